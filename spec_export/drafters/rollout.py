"""Unrolls drafters that go on from what they predicted, for all rows of a sequence at once.

A *level* is one run of the layers at every real row, along the true tokens. Level 0 reads the
target's features, each further level what the one before it predicted, as drafting does.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spec_export.drafters.fields import AtLeastOne, NotNegative
from spec_export.drafters.layers import (
    Batch,
    CachedGraph,
    DecoderLayer,
    DrafterBase,
    export_cached,
    rotate,
)
from spec_export.drafters.losses import IGNORED
from spec_export.model import decoder
from spec_export.model.config import own_rotary_table
from spec_export.model.ends import LayerDims, TargetEnds
from spec_export.model.modules.fusion import Fusion
from spec_runtime.errors import UserError
from spec_runtime.files.mapping import Checked


@dataclass(frozen=True)
class OwnSizes(Checked):
    """The settings of layers that need not be as the target's: sizes, where they are not its, and
    `rope`, parameters of a rotary embedding as transformers writes them, else the target's."""

    rope: dict[str, Any] | None = None
    intermediate_size: AtLeastOne | None = None
    num_heads: AtLeastOne | None = None
    num_kv_heads: AtLeastOne | None = None
    head_dim: AtLeastOne | None = None
    norm_eps: NotNegative | None = None


@dataclass(frozen=True)
class FusedConfig(OwnSizes):
    """The settings of drafters whose layers read a fusion of taps; see OwnSizes too.

    `taps` are the target layers whose inputs are read, in the order in which fc has them; the
    number of layers itself is the last layer's output.

    - `qk_norms`: queries and keys are normed, as Qwen3 does.
    - `own_embedding`: it has an embedding of its own, else the target's.
    - `hidden_size`: the width of its rows, where it is not the target's.
    - `sliding_layers`, `window`: the layers with a window, and its width in positions.
    """

    taps: tuple[int, ...] = ()
    qk_norms: bool = False
    own_embedding: bool = False
    hidden_size: AtLeastOne | None = None
    sliding_layers: tuple[int, ...] = ()
    window: AtLeastOne | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.taps:
            raise UserError("got no taps, expected the target layers that it reads: [2, 15, 27]")
        if self.sliding_layers and self.window is None:
            raise UserError(
                f"got sliding_layers {list(self.sliding_layers)} and no window, expected its width"
            )

    def window_of(self, layer: int) -> int | None:
        """Returns the width of a layer's window, None if it has none."""
        return self.window if layer in self.sliding_layers else None


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
        more_outputs: Sequence[str] = ("hidden",),
    ) -> dict[str, ir.Model]:
        """Returns the graph "drafter". Its outputs are the guesses and `more_outputs`, by default
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
                x = layer.finish(x, _attend(q, rows, layer.window))
            levels.append(x)
            feature = self.next_feature(x)
        return levels

    def embed(self, token: Tensor) -> Tensor:
        """Returns the embeddings [..., D] of tokens."""
        return self.embed_VD[token]


class FusedDrafter(RolloutDrafter):
    """The base of drafters that read a fusion of taps: `fusion`, `layers`, `norm`, and where they
    are its own `head` and `embedding`. Each starts from the target's where it has its shape."""

    fuses_taps = True
    config: Any  # a FusedConfig

    def add_parts(
        self,
        ends: TargetEnds,
        layers: Iterable[DecoderLayer],
        norms: str = "none",
        out_norm: bool = False,
        own_head: bool = True,
    ) -> None:
        """Makes the parameters; norms, out_norm: see Fusion.

        Raises UserError if a part that it borrows is of another width.
        """
        config, D, target_width = self.config, self.dims.hidden_size, ends.dims.hidden_size
        own = {"embedding": config.own_embedding, "head": own_head}
        lent = [part for part, is_own in own.items() if not is_own]
        if target_width != D and lent:
            raise UserError(
                f"got hidden_size {D} with the target's {' and '.join(lent)}, expected its "
                f"{target_width}, or {' and '.join(f'own_{part}' for part in lent)}"
            )
        eps = self.dims.norm_eps
        self.fusion = Fusion(config.taps, target_width, D, norms, eps, out_norm)
        self.layers = nn.ModuleList(layers)
        if not set(config.sliding_layers) <= {*range(len(self.layers))}:
            raise UserError(
                f"got sliding_layers {list(config.sliding_layers)}, expected some of the layers "
                f"0 to {len(self.layers) - 1}"
            )
        for layer in self.layers:
            layer.load_target_layer(ends.last_layer)
            layer.start_as_identity()
        self.norm = nn.Parameter(_start(ends.final_norm_D, torch.ones(D)))
        if own_head:
            self.head = nn.Parameter(_start(self.head_VD, _random_rows(len(self.head_VD), D)))
        if config.own_embedding:
            rows = _random_rows(len(ends.embed_VD), D)
            self.embedding = nn.Parameter(_start(ends.embed_VD, rows))

    @property
    def embedding_table(self) -> Tensor:
        return self.embedding if self.config.own_embedding else self.embed_VD

    def embed(self, token: Tensor) -> Tensor:
        return self.embedding_table[token]

    def output_rows(self, hidden: Tensor) -> Tensor:
        """Returns what the head reads, [..., D]."""
        return F.rms_norm(hidden, self.norm.shape, self.norm.to(hidden.dtype), self.dims.norm_eps)


def _random_rows(count: int, width: int) -> Tensor:
    return torch.randn(count, width) * width**-0.5


def _start(theirs: Tensor, random: Tensor) -> Tensor:
    """Returns a copy of the target's tensor if it has the drafter's shape, else random numbers."""
    return theirs.float().clone() if theirs.shape == random.shape else random


def equal_weights(rows_RD: Tensor) -> Tensor:
    """Returns the weights of a mean over these rows, f32[R]."""
    return torch.full((len(rows_RD),), 1 / max(len(rows_RD), 1), device=rows_RD.device)


def _attend(q: Tensor, rows: list[tuple[Tensor, Tensor]], window: int | None) -> Tensor:
    """Returns the attention [B, R, H*Dh] of a level's queries [B, R, H, Dh] over the keys and
    values [B, R, G, Dh] of all levels so far; the level's own are the last.

    Row t sees rows up to t of level 0, and of the other levels only the rows of its own path; with
    a window, only those of the last `window` positions up to its own.
    """
    (k, v), *group = rows
    R, H, Dh = q.shape[1:]
    behind_RR = torch.arange(R, device=q.device)[:, None] - torch.arange(R, device=q.device)
    is_seen_RR = behind_RR >= 0
    if window is not None:
        is_seen_RR &= behind_RR + len(group) < window
        group = group[-window:]
    if len(rows) == 1:
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        mask = None if window is None else is_seen_RR
        mixed = F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=mask is None, enable_gqa=True
        )
        return mixed.transpose(1, 2).flatten(-2)
    G = k.shape[2]
    q = q.unflatten(2, (G, H // G)) * Dh**-0.5  # heads h of one key/value head g
    to_real = torch.einsum("brghd,bsgd->bghrs", q, k)
    to_real = to_real.masked_fill(~is_seen_RR, torch.finfo(to_real.dtype).min)
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
    visible_BAKR: Tensor,
    group_KK: Tensor,
) -> Tensor:
    """Returns the attention [B,A,K,H*Dh] of mask rows q [B,A,K,H,Dh] over real keys and values
    [B,G,R,Dh] and those of their own group, k and v [B,A,K,G,Dh].

    visible_BAKR says which real rows a mask sees, K being 1 where all of a group see the same ones,
    and group_KK which masks a mask sees.
    """
    B, A, K, H, Dh = q.shape
    G = real_k.shape[1]
    q = q.unflatten(-2, (G, H // G)) * Dh**-0.5  # heads h of one key/value head g
    to_real = torch.einsum("bakghd,bgrd->bghakr", q, real_k)
    to_group = torch.einsum("bakghd,bajgd->bghakj", q, k)
    low = torch.finfo(to_real.dtype).min
    to_real = to_real.masked_fill(~visible_BAKR[:, None, None], low)
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


def choose_groups(
    label_BRK: Tensor, has_label_BR: Tensor, fraction: float, generator: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    """Returns what `choose_anchors` does, with the labels i64[B, A, K] of the anchors' groups in
    place of its mask: IGNORED where the index is padding."""
    anchor_BA, is_anchor_BA = choose_anchors(has_label_BR, fraction, generator)
    label_BAK = label_BRK.gather(1, anchor_BA[..., None].expand(-1, -1, label_BRK.shape[-1]))
    return anchor_BA, label_BAK.masked_fill(~is_anchor_BA[..., None], IGNORED)
