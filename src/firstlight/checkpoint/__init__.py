"""Checkpoints of runs: written atomically, verified before use, and stored sharded or in a single
file.
"""
