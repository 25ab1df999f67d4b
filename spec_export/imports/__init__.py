"""Reads and writes files of other libraries. An annex: found by name in `model/annex.py`."""
