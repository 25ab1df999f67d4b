"""Carries bundles to and from repositories of a Hugging Face hub; needs the extra `hub`."""
