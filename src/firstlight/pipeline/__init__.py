"""From texts to a model with one command: scan, settings for a budget, tokenizer, shards, run."""
