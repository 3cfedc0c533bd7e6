"""Predict the speed of a training step from the operators that a trace counted."""
