"""Measures decoding: speed (bench, tune), losslessness (audit, distribution_test) and quality."""
