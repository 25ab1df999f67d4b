"""Holds conversations with an engine, and engines for asyncio."""
