"""Reads and writes OpenAI's Responses API, whose requests are answered as chats."""
