"""Reads and writes Anthropic's Messages API, whose requests are answered as chats."""
