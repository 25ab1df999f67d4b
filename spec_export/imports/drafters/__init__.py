"""Reads drafters that other libraries have trained, measures whether they were read rightly, and
writes ours in their forms."""
