"""Training: setting up a run, the step, the loop, evaluations, checkpoints, logs and trackers."""
