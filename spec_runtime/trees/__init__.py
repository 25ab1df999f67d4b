"""Holds the draft as a token tree, and everything that shapes one: budgets, growth, templates."""
