"""Describes Ministral 3: Llama's layer, with queries that grow past the original context."""

from __future__ import annotations

from spec_export.model.families.family import Family

FAMILY = Family(query_growth="llama_4_scaling_beta", reads=("max_position_embeddings",))
