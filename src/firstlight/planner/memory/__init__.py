"""Predict the memory use of a training step, an evaluation or text generation from a trace, without
allocating this memory."""
