"""Builds a bundle: options, drafters, graphs, plans, manifest."""
