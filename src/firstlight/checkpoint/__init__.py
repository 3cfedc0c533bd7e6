"""Checkpoints of runs: written atomically, verified before use, sharded or in a single file."""
