"""Decides how much to draft: what passes and drafts cost here, and which trees pay."""
