"""Keeps answers inside a grammar: a JSON schema, a regular expression or a context-free grammar.

Nothing outside of `llguidance_matcher.py` and `model_tokens.py` knows which library reads grammars.
"""
