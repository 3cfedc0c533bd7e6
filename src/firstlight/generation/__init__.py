"""Text generation: sampling, token-by-token decoding, beam search, chat and JSON constrained by a
schema."""
