"""Holds the manifest of a bundle, and the checks that come before its graphs are opened."""
