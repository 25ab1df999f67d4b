"""Trains drafters from recipes, alone or together with an adapter on their target."""
