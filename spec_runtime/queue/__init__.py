"""Puts requests in order: sessions, engines for asyncio, and the one queue in front of them."""
