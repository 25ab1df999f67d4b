"""Describes ERNIE 4.5 and Helium: Llama's layer, with neighbours rotated instead of halves."""

from __future__ import annotations

from spec_export.model.families.family import Family

FAMILY = Family(interleaved=True)
