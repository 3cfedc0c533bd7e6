"""What a training step, an evaluation or a generation takes, before anything is allocated."""
