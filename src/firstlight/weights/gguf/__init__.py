"""GGUF files, the format of llama.cpp: reading and writing models and their tokenizers."""
