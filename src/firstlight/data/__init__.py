"""Corpora: sources of text, preparation into token shards, rows, and the training loader."""
