"""Checkpoints of runs: written whole or not at all, verified before use, sharded or in one file."""
