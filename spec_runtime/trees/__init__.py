"""Holds the draft as a token tree, and all that shapes one: budgets, growth, templates, drawing."""
