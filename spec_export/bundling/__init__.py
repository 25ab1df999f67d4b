"""Holds the parts of building a bundle that `make_bundle` puts together."""
