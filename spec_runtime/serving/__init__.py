"""Serves a bundle over OpenAI's API; needs the extra `serve`, and on a Ray cluster the extra
`ray`."""
