"""Trains drafters with PyTorch and exports them with their target as a bundle.

Nothing large is imported here: each verb imports what it needs, so that `--help` works without
torch.
"""

import os

# huggingface_hub reads it when transformers imports it, and sends no figures about its use then.
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
