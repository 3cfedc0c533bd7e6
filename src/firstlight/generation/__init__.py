"""Text generation: sampling, token-by-token decoding, beam search, chat, and JSON output that
follows a schema.
"""
