"""Writes files whole or not at all, checks what JSON and TOML say, and describes the machine."""
