"""Lets callers wait for the target, and ends what takes too long."""
