"""Predict the speed of a training step from the operators in its trace."""
