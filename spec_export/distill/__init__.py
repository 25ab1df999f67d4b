"""Generates training data: prompts answered by the target itself."""
