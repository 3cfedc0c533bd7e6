"""Training data: text sources, preparation of token shards, packing of rows, and the data
loader.
"""
