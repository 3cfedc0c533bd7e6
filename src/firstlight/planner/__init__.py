"""Memory and speed of a training step, an evaluation or a generation, before it runs."""
