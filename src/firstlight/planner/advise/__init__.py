"""What to train with a budget: used by `plan --budget` and by `train TEXTS`."""
