"""Holds conversations with an engine, engines for asyncio, and the queue in front of engines."""
