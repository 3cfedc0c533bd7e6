"""Choose the model and the run for a budget, for `plan --budget` and `train TEXTS`."""
