"""Reads drafters that other libraries have trained, and measures whether they were read rightly."""
