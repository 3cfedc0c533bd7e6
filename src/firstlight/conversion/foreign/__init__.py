"""Checkpoints of other programs: one file per program, and what they share."""
