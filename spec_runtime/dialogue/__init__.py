"""Holds what models say: messages, their template, thinking, calls of tools, text as it comes."""
