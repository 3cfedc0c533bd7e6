"""Share models and prepared corpora on the Hugging Face hub.

This package writes model cards and dataset cards, assembles the folders to share, and uploads them.
"""
