"""Knows what passes and drafts cost on this machine, and which trees pay at these costs."""
