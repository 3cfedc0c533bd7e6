"""Estimate the memory and speed of training, evaluation and generation before running them."""
