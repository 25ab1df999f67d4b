"""Reads GGUF files: header, config, vocabulary and weights."""
