"""Share models and prepared corpora on the Hugging Face hub. This package writes the cards and
folders, and uploads them.
"""
