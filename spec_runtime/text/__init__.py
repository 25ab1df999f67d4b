"""Turns prompts into tokens and tokens into text: tokenizers and their control tokens."""
