"""Predict the memory of a training step, an evaluation or a generation from a trace, without
allocating that memory."""
