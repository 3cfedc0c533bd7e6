"""Text generation: sampling, token-by-token decoding, beam search, chat, and JSON output
constrained by a schema.
"""
