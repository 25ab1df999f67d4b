"""Serves a bundle over OpenAI's and Anthropic's APIs; needs the extra `serve`, and on a Ray cluster
the extra `ray`. An annex: only `spec-runtime serve` imports it."""
