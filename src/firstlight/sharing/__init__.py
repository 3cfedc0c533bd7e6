"""Share models and prepared corpora on the Hugging Face hub: cards, folders and uploads."""
