"""Read checkpoints of other programs. Each program has its own module, and `layout` and `model` are
shared.
"""
