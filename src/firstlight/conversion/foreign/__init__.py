"""Checkpoints of other programs: one module per program, and shared code."""
