"""Describes Llama, whose layer is the one that all tables start from.

Several families are Llama under another name, with biases or windows by their configs.
"""

from __future__ import annotations

from spec_export.model.families.family import Family

FAMILY = Family()
