"""Answers one request: draft, verify, accept, commit; its options, its rows and its result."""
