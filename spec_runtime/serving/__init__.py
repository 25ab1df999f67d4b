"""Names the room of the server, which speaks OpenAI's API; it needs the extra `serve`, and on a Ray
cluster the extra `ray`."""
