"""Text generation: sampling, decoding token by token, beam search, chat and JSON by a schema."""
