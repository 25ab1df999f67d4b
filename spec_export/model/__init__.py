"""Holds the target: its family, config, layers and weights, and the files that they come from."""
