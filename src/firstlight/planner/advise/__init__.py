"""Choose what to train with a budget; used by `plan --budget` and `train TEXTS`."""
