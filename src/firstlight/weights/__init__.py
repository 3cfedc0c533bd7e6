"""Weights of models in Hugging Face folders, read and written without a second copy in memory."""
