"""Describes Gemma: scaled embeddings, and norms whose weights are stored less 1."""

from __future__ import annotations

from spec_export.model.families.family import Family, Scale

FAMILY = Family(
    unit_offset=True,
    embedding_scale=Scale("hidden_size", 0.5),
)
