"""PyTorch side of specsplit: distil, train, trace, check, and write a bundle.

Nothing is imported here: each verb pulls in what it needs, so that ``--help`` needs no torch.
"""
