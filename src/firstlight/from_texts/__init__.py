"""Trains a model from texts with one command: it scans the texts, chooses settings for a budget of
time, trains a tokenizer, prepares token shards, and runs the training."""
