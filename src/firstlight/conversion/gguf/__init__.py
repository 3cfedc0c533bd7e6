"""GGUF, the format of llama.cpp: read, write and quantise."""
