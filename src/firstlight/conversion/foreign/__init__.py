"""Read checkpoints of other programs: one module per program, plus shared code."""
