"""Turns prompts into tokens and tokens into text: tokenizers, chat templates, control tokens."""
