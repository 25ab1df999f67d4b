"""Bounds how many requests wait, lets callers have the target in order, and ends calls early."""
