"""Read and write models and tokenizers in GGUF, the file format of llama.cpp."""
