"""Evaluation of models: loss on held-out text, and scores in tasks."""
