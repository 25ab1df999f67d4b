"""Reads drafters of other libraries, measures whether that went right; writes ours as theirs."""
