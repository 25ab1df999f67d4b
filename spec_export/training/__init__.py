"""Trains drafters from recipes, on a frozen target or together with an adapter on it."""
