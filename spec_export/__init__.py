"""Trains drafters with PyTorch and exports them with their target as a bundle.

Nothing is imported here: each verb imports what it needs, so that `--help` works without torch.
"""
