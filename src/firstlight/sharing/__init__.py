"""Sharing a model or a prepared corpus on the Hugging Face hub: cards, folders, uploads."""
