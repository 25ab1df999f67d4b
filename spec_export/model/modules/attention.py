"""Defines attention over a cache, and what all layers share in one pass.

Letters: N rows of one step, S cache slots, A rows moved, U written, H query heads, G key/value
heads, Dh head width.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spec_export.model.config import DecoderConfig
from spec_export.model.families import capped
from spec_export.model.modules.basic import Norm, Projection, frozen

Table = tuple[Tensor, Tensor]  # cos and sin, [rows, rotary_dim/2] each


@dataclass(frozen=True)
class SharedInputs:
    """Holds the inputs that all layers share in one pass; for shapes see `Backbone.forward`.

    cos and sin are the default rotary table, `tables` those of other names. `windows` are the
    masks of layers with a sliding window by its width, where it is narrower than the context.
    query_scale [1,1,N,1] is a factor on the queries. ancestors: what `find_ancestors` returns, for
    convolutions.
    """

    position_ids: Tensor
    mask: Tensor
    write_index: Tensor
    src: Tensor
    perm: Tensor
    cos: Tensor
    sin: Tensor
    windows: Mapping[int, Tensor] = field(default_factory=dict)
    tables: Mapping[str, Table] = field(default_factory=dict)
    query_scale: Tensor | None = None
    ancestors: tuple[Tensor, Tensor] | None = None

    def mask_for(self, window: int | None) -> Tensor:
        """Returns the mask of a layer whose sliding window has this width, None for no window."""
        return self.mask if window is None else self.windows.get(window, self.mask)

    def table(self, name: str) -> Table:
        """Returns the rotary table of this name, "" for the default one."""
        return self.tables[name] if name else (self.cos, self.sin)


def window_mask(mask: Tensor, width: int) -> Tensor:
    """Returns what of a mask bool[1,1,N,S] a sliding window of this width leaves: a row at position
    p sees the keys at positions above p - width.

    A row sees one key at each position up to its own, in ascending order, so that the last `width`
    of them are counted. In the slots form keys are in no order; see graphs/slots.py.
    Example, width 2: a row of a mask that is [1, 1, 0, 1, 0] becomes [0, 1, 0, 1, 0].
    """
    count = mask.cumsum(-1)
    return mask & (count > count[..., -1:] - width)


def key_positions(mask: Tensor) -> Tensor:
    """Returns the positions i64[1,1,N,S] of the keys that rows see, where each row sees a key at
    every position from 0 on, in ascending order. In the slots form keys are in no order; see
    graphs/slots.py."""
    return mask.cumsum(-1) - 1


def scatter_rows(cache_GSD: Tensor, update_GUD: Tensor, write_index: Tensor) -> Tensor:
    """Returns the cache [1,G,S,Dh] with U of its rows, from write_index on, replaced.

    The update is [1,G,U,Dh]. Example: write_index 10 and U = 3 replace rows 10, 11 and 12.
    """
    if torch.onnx.is_in_onnx_export():
        return torch.onnx.ops.symbolic(
            "TensorScatter",
            (cache_GSD, update_GUD, write_index),
            attrs={"axis": -2},
            dtype=cache_GSD.dtype,
            shape=cache_GSD.shape,
            version=24,
        )
    slots_U = write_index + torch.arange(update_GUD.shape[2], device=cache_GSD.device)
    return cache_GSD.index_copy(2, slots_U, update_GUD)


def write_rows(past: Tensor, new: Tensor, shared: SharedInputs) -> Tensor:
    """Keeps the last step's accepted rows and appends this step's, in a single scatter.

    Example: the length is 10. The last step wrote rows 10 to 12, and accepted rows 10 and 12.
    The new rows are x and y, and there is room to move A = 3 rows. With write_index 10, src [10,
    12, 0] and perm [0, 1, 3, 4, 2], rows 10 to 14 become old 10, old 12, x, y and a row that is not
    used.
    """
    update = torch.cat((past.index_select(2, shared.src), new), dim=2)
    return scatter_rows(past, update.index_select(2, shared.perm), shared.write_index)


class Attention(nn.Module):
    """Attends over a cache with grouped queries: one QKV product, one rotary call, two writes."""

    sinks: nn.Parameter | None

    def __init__(
        self,
        config: DecoderConfig,
        qkv: Projection,
        out: Projection,
        q_norm: Norm | None = None,
        k_norm: Norm | None = None,
        *,
        qk_norm: str = "head",
        rope: str | None = "",
        interleaved: bool = False,
        window: int | None = None,
        scale: float | None = None,
        softcap: float = 0.0,
        sinks_H: Tensor | None = None,
    ) -> None:
        """qk_norm, interleaved: see `Family`; rope and window: see `LayerKind`. scale: of the
        scores, Dh**-0.5 by default. softcap: see `capped`.
        sinks_H: one more score for each query head, which has no value.
        """
        super().__init__()
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.head_dim = config.head_dim
        # The operator's own default (0) means "all of the head".
        self.rotary_dim = 0 if config.rotary_dim == config.head_dim else config.rotary_dim
        self.qkv, self.out, self.q_norm, self.k_norm = qkv, out, q_norm, k_norm
        self.qk_norm, self.rope, self.interleaved = qk_norm, rope, interleaved
        self.window, self.scale, self.softcap = window, scale, softcap
        self.sinks = None if sinks_H is None else frozen(sinks_H)

    @property
    def input_product(self) -> Projection:
        """The one product that reads the attention's input."""
        return self.qkv

    def forward(
        self, x_ND: Tensor, past: Sequence[Tensor], shared: SharedInputs
    ) -> tuple[Tensor, list[Tensor]]:
        """Maps x [N,D] and past keys and values [1,G,S,Dh] to the output [N,D] and new caches."""
        H, G, Dh = self.num_heads, self.num_kv_heads, self.head_dim
        qkv = self.qkv(x_ND)
        if self.q_norm is not None and self.k_norm is not None and self.qk_norm == "whole":
            q, k, v = qkv.split((H * Dh, G * Dh, G * Dh), dim=-1)
            qkv = torch.cat((self.q_norm(q), self.k_norm(k), v), dim=-1)
        heads = qkv.view(1, -1, H + 2 * G, Dh).transpose(1, 2)
        if self.qk_norm == "head" and self.q_norm is not None:
            q, k, v = heads.split((H, G, G), dim=1)
            qk = self._normed(q, k)
        else:
            qk, v = heads.split((H + G, G), dim=1)
        if self.rope is not None:
            qk = torch.onnx.ops.rotary_embedding(
                qk,
                *shared.table(self.rope),
                shared.position_ids,
                interleaved=self.interleaved,
                rotary_embedding_dim=self.rotary_dim,
            )
        if self.qk_norm == "head_after":
            qk = self._normed(*qk.split((H, G), dim=1))
        q, k = qk.split((H, G), dim=1)
        if shared.query_scale is not None:
            q = q * shared.query_scale
        k, v = (write_rows(old, new, shared) for old, new in zip(past, (k, v), strict=True))
        mixed = self._attend(q, k, v, shared.mask_for(self.window))
        return self.out(mixed.transpose(1, 2).contiguous().view(-1, H * Dh)), [k, v]

    def _normed(self, q: Tensor, k: Tensor) -> Tensor:
        """Returns queries and keys [1,heads,N,Dh], normed over each head, side by side."""
        assert self.q_norm is not None, "got no norms"
        assert self.k_norm is not None, "got no norms"
        return torch.cat((self.q_norm(q), self.k_norm(k)), dim=1)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        """Returns the mixed values [1,H,N,Dh] of queries [1,H,N,Dh] over the caches [1,G,S,Dh]."""
        H, G = self.num_heads, self.num_kv_heads
        if self.sinks is not None:
            k, v, mask = self._with_sinks(k, v, mask)
        if not self.softcap:
            # The exporter refuses the flag where every query head has keys of its own.
            return F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, scale=self.scale, enable_gqa=H != G
            )
        scale = self.head_dim**-0.5 if self.scale is None else self.scale
        if torch.onnx.is_in_onnx_export():
            return torch.onnx.ops.symbolic(
                "Attention",
                (q, k, v, mask),
                attrs={"scale": scale, "softcap": self.softcap},
                dtype=q.dtype,
                shape=q.shape,
                version=24,
            )
        k, v = (part.repeat_interleave(H // G, dim=1) for part in (k, v))
        scores = capped((q @ k.transpose(2, 3)) * scale, self.softcap)
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        return scores.softmax(-1, dtype=torch.float32).to(v.dtype) @ v

    def _with_sinks(self, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Appends one slot to keys and values, of zeros, whose score is that of the sinks.

        The mask bool[1,1,N,S] becomes what is added to scores, [1,H,N,S+1]. Example: with mask
        [1, 0] and a sink of 0.7 a head's row becomes [0, lowest, 0.7].
        """
        assert self.sinks is not None, "got no sinks"
        nothing = k.new_zeros(1, self.num_kv_heads, 1, self.head_dim)
        lowest = torch.tensor(torch.finfo(k.dtype).min, dtype=k.dtype)
        added = torch.where(mask, torch.zeros((), dtype=k.dtype), lowest)
        added = added.expand(1, self.num_heads, -1, -1)
        sinks = self.sinks.view(1, -1, 1, 1).expand(1, -1, added.shape[2], 1)
        k, v = (torch.cat((part, nothing), dim=2) for part in (k, v))
        return k, v, torch.cat((added, sinks), dim=-1)
