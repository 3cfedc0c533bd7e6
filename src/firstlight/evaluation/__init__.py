"""Evaluate models by their loss on held-out text and their scores on tasks."""
