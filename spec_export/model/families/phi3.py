"""Describes Phi-3 and Phi-4: Llama's layer with fused products.

In Phi-4-mini a part of each head is rotated.
"""

from __future__ import annotations

from spec_export.model.families.family import Family

FAMILY = Family(
    qkv=("self_attn.qkv_proj",),
    up=("mlp.gate_up_proj",),
    rotates_part=True,
)
