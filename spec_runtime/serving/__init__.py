"""Serves a bundle over OpenAI's and Anthropic's APIs; needs the extra `serve`, and on a Ray cluster
the extra `ray`."""
