"""Reads and answers requests in the form of OpenAI's API."""
