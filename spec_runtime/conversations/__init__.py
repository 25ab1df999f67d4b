"""Knows which conversations' KV rows are there, and keeps copies of earlier ones."""
