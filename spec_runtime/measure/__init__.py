"""Measures decoding: speed (bench, tune) and losslessness (audit)."""
