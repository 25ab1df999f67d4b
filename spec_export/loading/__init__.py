"""Reads foreign models: their files are validated, and code that comes with them is never run."""
