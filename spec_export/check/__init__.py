"""Compares graphs with transformers, and measures how often drafters guess right."""
