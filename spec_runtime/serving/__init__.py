"""Names the room of the server, which speaks OpenAI's API; it needs the extra `serve`."""
