"""Carries bundles to and from repositories of a Hugging Face hub; needs the extra `hub`."""

import os

# huggingface_hub reads it when it is imported, and sends no figures about its use then.
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
