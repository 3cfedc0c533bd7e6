"""Prepare and load training data: text sources, token shards, row packing, and the data loader."""
