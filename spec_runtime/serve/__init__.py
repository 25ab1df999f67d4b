"""Serves a bundle over OpenAI's and Anthropic's APIs; needs the extra `serve`. An annex: only
`spec-runtime serve` imports it."""
