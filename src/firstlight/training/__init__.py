"""Training: setup, optimizer steps, training loop, evaluations, checkpoints, logs and trackers."""
