"""Train models. This package sets up a run and contains the training loop, optimizer steps,
evaluations, checkpoints, logs and experiment trackers.
"""
