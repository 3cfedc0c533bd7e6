"""The memory of a training step, an evaluation or a generation, from a trace without memory."""
