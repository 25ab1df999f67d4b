"""Unrolls drafters that go on from what they predicted, for all rows of a sequence at once.

A *level* is one run of the layers at every real row, along the true tokens. Level 0 reads the
target's features, each further level what the one before it predicted, as drafting does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor
from torch.nn import functional as F

from spec_export import decoder
from spec_export.decoder_config import own_rotary_table
from spec_export.drafters.layers import (
    Batch,
    CachedGraph,
    DrafterBase,
    LayerDims,
    TargetEnds,
    export_cached,
    rotate,
)
from spec_runtime.errors import UserError


class RolloutDrafter(DrafterBase):
    """The base of drafters that read their own predictions, made by `layers`.

    Sizes that `config` names, by the names of LayerDims, and a `rope` in it take the place of the
    target's. With a `mask_token_id` the rows of all levels but the first read this token in place
    of their own.
    """

    mask_token_id: int | None = None
    layers: Any  # nn.ModuleList of DecoderLayer; mypy sees plain Modules in it

    def __init__(self, config: Any, ends: TargetEnds, draft_token_ids: Tensor | None) -> None:
        super().__init__(config, ends, draft_token_ids)
        sizes = {field.name: getattr(config, field.name, None) for field in fields(LayerDims)}
        given = {name: size for name, size in sizes.items() if size is not None}
        self.dims = dims = replace(ends.dims, **given)
        if config.rope is not None:
            self.cos, self.sin = own_rotary_table(config.rope, dims.head_dim, len(ends.cos))
        elif dims.head_dim != ends.dims.head_dim:
            raise UserError(
                f"got head_dim {dims.head_dim} with the target's rotary embedding, expected its "
                f"{ends.dims.head_dim}, or parameters in rope"
            )

    def cache_config(self, target: decoder.DecoderConfig) -> decoder.DecoderConfig:
        """Returns a target's config with the drafter's own layers, for graphs with a cache."""
        return replace(
            target,
            hidden_size=self.dims.hidden_size,
            num_layers=len(self.layers),
            num_heads=self.dims.num_heads,
            num_kv_heads=self.dims.num_kv_heads,
            head_dim=self.dims.head_dim,
            rotary_dim=2 * self.cos.shape[1],
            norm_eps=self.dims.norm_eps,
            taps=(),
            layers=(),
        )

    def export_graph(
        self,
        graph: CachedGraph,
        config: decoder.DecoderConfig,
        name: str,
        capacity_symbolic: bool,
        more_outputs: Sequence[str] = ("hidden",),
    ) -> dict[str, ir.Model]:
        """Returns the graph "drafter", which beside its guesses gives `more_outputs`, by default
        what the next level reads.

        config: see `cache_config`. name: the drafter's.
        """
        model = export_cached(
            graph,
            config,
            self.head_VD.dtype,
            [*self.output_names(), *more_outputs],
            name,
            feature_width=self.dims.hidden_size,
            capacity_symbolic=capacity_symbolic,
        )
        return {"drafter": model}

    def input_rows(self, embedding: Tensor, feature: Tensor) -> Any:
        """Returns the first layer's input from embedding and feature, both [..., D]."""
        raise NotImplementedError

    def next_feature(self, predicted: Tensor) -> Tensor:
        """Returns what the next level reads of this level's output [..., D]."""
        return predicted

    def rollout(self, batch: Batch, feature_BTD: Tensor, num_levels: int) -> list[Tensor]:
        """Returns each level's output [B, T-1, D], along the true tokens.

        Row t of level k belongs to token t+1+k at position t+k and predicts what follows it.
        """
        R = batch.token_BT.shape[1] - 1
        token_BT = F.pad(batch.token_BT, (0, num_levels))  # no label there
        feature = feature_BTD[:, :-1]
        earlier: list[list[tuple[Tensor, Tensor]]] = [[] for _ in self.layers]
        levels = []
        for level in range(num_levels):
            token_BR = token_BT[:, 1 + level : 1 + level + R]
            if level and self.mask_token_id is not None:
                token_BR = torch.full_like(token_BR, self.mask_token_id)
            x = self.input_rows(self.embed(token_BR), feature)
            cos, sin = self.cos[level : level + R], self.sin[level : level + R]
            for layer, rows in zip(self.layers, earlier, strict=True):
                q, k, v = layer.project_qkv(x)
                q, k = rotate(q, cos, sin), rotate(k, cos, sin)
                rows.append((k, v.to(k.dtype)))
                x = layer.finish(x, _attend(q, rows))
            levels.append(x)
            feature = self.next_feature(x)
        return levels

    def embed(self, token: Tensor) -> Tensor:
        """Returns the embeddings [..., D] of tokens."""
        return self.embed_VD[token]


def equal_weights(rows_RD: Tensor) -> Tensor:
    """Returns the weights of a mean over these rows, f32[R]."""
    return torch.full((len(rows_RD),), 1 / max(len(rows_RD), 1), device=rows_RD.device)


def _attend(q: Tensor, rows: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Returns the attention [B, R, H*Dh] of a level's queries [B, R, H, Dh] over the keys and
    values [B, R, G, Dh] of all levels so far, the last of which are the level's own.

    Row t sees rows up to t of level 0, and of the other levels only the rows of its own path.
    """
    (k, v), *group = rows
    if not group:
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return mixed.transpose(1, 2).flatten(-2)
    R, H, Dh = q.shape[1:]
    G = k.shape[2]
    q = q.unflatten(2, (G, H // G)) * Dh**-0.5  # heads h of one key/value head g
    to_real = torch.einsum("brghd,bsgd->bghrs", q, k)
    is_later_RR = torch.ones(R, R, dtype=torch.bool, device=q.device).triu(1)
    to_real = to_real.masked_fill(is_later_RR, torch.finfo(to_real.dtype).min)
    to_group = [torch.einsum("brghd,brgd->bghr", q, own) for own, _ in group]
    weight = torch.cat((to_real, torch.stack(to_group, -1)), -1).softmax(-1).to(v.dtype)
    out = torch.einsum("bghrs,bsgd->brghd", weight[..., :R], v)
    for j, (_, own) in enumerate(group):
        out = out + torch.einsum("bghr,brgd->brghd", weight[..., R + j], own)
    return out.flatten(2)


def attend_groups(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    real_k: Tensor,
    real_v: Tensor,
    visible_BAR: Tensor,
    group_KK: Tensor,
) -> Tensor:
    """Returns the attention [B,A,K,H*Dh] of mask rows q [B,A,K,H,Dh] over real keys and values
    [B,G,R,Dh] and those of their own group, k and v [B,A,K,G,Dh].

    visible_BAR says which real rows a group sees, group_KK which masks a mask sees.
    """
    B, A, K, H, Dh = q.shape
    G = real_k.shape[1]
    q = q.unflatten(-2, (G, H // G)) * Dh**-0.5  # heads h of one key/value head g
    to_real = torch.einsum("bakghd,bgrd->bghakr", q, real_k)
    to_group = torch.einsum("bakghd,bajgd->bghakj", q, k)
    low = torch.finfo(to_real.dtype).min
    to_real = to_real.masked_fill(~visible_BAR[:, None, None, :, None], low)
    to_group = to_group.masked_fill(~group_KK, low)
    weight = torch.cat((to_real, to_group), -1).softmax(-1).to(v.dtype)
    R = real_k.shape[2]
    out = torch.einsum("bghakr,bgrd->bakghd", weight[..., :R], real_v)
    out = out + torch.einsum("bghakj,bajgd->bakghd", weight[..., R:], v)
    return out.reshape(B, A, K, H * Dh)


def choose_anchors(
    has_label_BR: Tensor, fraction: float, generator: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    """Returns the row indices i64[B, A] of the groups' anchors, a random `fraction` of the rows
    with a label, and bool[B, A], False where a sequence has fewer than A anchors and the index is
    padding."""
    score = torch.rand(has_label_BR.shape, generator=generator).to(has_label_BR.device)
    score = torch.where(has_label_BR, score, -1.0)
    num_B = (has_label_BR.sum(1) * fraction).ceil().long()
    A = max(int(num_B.max()), 1)
    anchor_BA = score.topk(A, dim=1).indices
    return anchor_BA, torch.arange(A, device=num_B.device) < num_B[:, None]
