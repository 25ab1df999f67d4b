"""Holds one request on its way: its options, its steps, its result."""
