"""GGUF files, the format of llama.cpp: read and write models and their tokenizers."""
