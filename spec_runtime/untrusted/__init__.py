"""Reads what a stranger may have written, within limits: graphs' files, chat templates, tokenizers.

A bundle may come from anywhere. Whatever it holds must not read files outside of it, run for
ever, or take all memory.
"""
