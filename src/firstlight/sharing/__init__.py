"""Share models and prepared corpora on the Hugging Face hub.

This package writes model cards, dataset cards and the folders to share, and uploads them.
"""
