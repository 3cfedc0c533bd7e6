"""Training data: sources of text, preparation of token shards, packing of rows, and the loader."""
