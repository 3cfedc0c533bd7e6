"""Modelfiles for Ollama, and files in the formats of llama.cpp's quantiser."""
