"""Holds the modules that decoder layers are put together from."""
