"""Estimate the memory use and speed of training, evaluation and text generation in advance."""
