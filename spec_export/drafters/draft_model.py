"""Defines draft models: small language models of their own, which read tokens and no feature.

A draft model is a Llama-like one trained here, or any causal LM of a supported family with the
target's vocabulary (`Pretrained`). One trained here borrows the target's embedding and LM head,
frozen, through two projections:

    x_t = e(token t) · P_in,   q(token t+1) = softmax(LM_head(RMSNorm(layers(x)_t) · P_out))

A vocabulary of its own would be most of the model: 49 k tokens of width 384 are 19 M parameters,
twice the rest. On export the projections are folded into both tables.

The model's row t+1 guesses token t+2, which is guess 0 of row t for all drafters. The loss is the
mean cross-entropy of the answers' tokens plus prompt_weight · the mean of the other tokens'.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spec_export.drafters.fields import AtLeastOne, NoTaps, NotNegative, Share
from spec_export.drafters.layers import (
    Batch,
    CachedGraph,
    DecoderLayer,
    DrafterBase,
    export_cached,
    level_config,
)
from spec_export.drafters.losses import IGNORED
from spec_export.model import decoder
from spec_export.model.ends import LayerDims, TargetEnds
from spec_runtime.errors import UserError
from spec_runtime.files.mapping import Checked


@dataclass(frozen=True)
class Config(Checked):
    """The model's sizes and how it drafts.

    Its attention heads are as wide as the target's, because it uses the target's rotary tables.
    `num_guesses` levels are drafted, and `max_width` nodes expanded in each: 1 drafts a chain.
    `soft_weight` is the share of the target's distribution in the labels.
    """

    hidden_size: AtLeastOne = 384
    intermediate_size: AtLeastOne = 1024
    layers: AtLeastOne = 6
    num_heads: AtLeastOne = 6
    num_kv_heads: AtLeastOne = 2
    num_guesses: AtLeastOne = 5
    max_width: AtLeastOne = 8
    taps: NoTaps = ()
    top_k: AtLeastOne = 10
    soft_weight: Share = 0.0
    prompt_weight: NotNegative = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_heads % self.num_kv_heads:
            raise UserError(
                f"got num_heads {self.num_heads}, expected a multiple of num_kv_heads, "
                f"{self.num_kv_heads}"
            )


class Drafter(DrafterBase):
    """A model trained here: projections, layers and norm; see DrafterBase for what it borrows."""

    is_whole_model = True
    config: Config
    layers: Any  # nn.ModuleList of DecoderLayer; mypy sees plain Modules in it

    def __init__(
        self, config: Config, ends: TargetEnds, draft_token_ids: Tensor | None = None
    ) -> None:
        super().__init__(config, ends, draft_token_ids)
        D, d = ends.dims.hidden_size, config.hidden_size
        self.layer_dims = LayerDims(
            d,
            config.intermediate_size,
            config.num_heads,
            config.num_kv_heads,
            ends.dims.head_dim,
            ends.dims.norm_eps,
        )
        # rows and logits start with a variance of 1
        embed_std, head_std = ends.embed_VD.float().std(), ends.head_VD.float().std()
        self.project_in = nn.Parameter(torch.randn(D, d) * D**-0.5 / embed_std)
        self.layers = nn.ModuleList(DecoderLayer(self.layer_dims) for _ in range(config.layers))
        self.final_norm = nn.Parameter(torch.ones(d))
        self.project_out = nn.Parameter(torch.randn(d, D) * (d * D) ** -0.5 / head_std)

    def hidden_rows(self, token_BT: Tensor) -> Tensor:
        """Returns the last hidden states, [B, T, d]: row t has read tokens 0 … t."""
        x = self.embed_VD[token_BT] @ self.project_in
        for layer in self.layers:
            x = layer.causal(x, self.cos, self.sin)
        return x

    def output_rows(self, hidden: Tensor) -> Tensor:
        """Returns what the target's head reads, [..., D], from hidden rows [..., d]."""
        norm, eps = self.final_norm.to(hidden.dtype), self.dims.norm_eps
        return F.rms_norm(hidden, norm.shape, norm, eps) @ self.project_out

    def loss(
        self, batch: Batch, generator: torch.Generator | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the mean loss of a batch, f32 scalar, and the answers' top-1 hits `correct_K` and
        labelled rows `count_K` of guess 0, i64[1].

        Tokens past the end or outside the draft vocabulary are ignored. Nothing is random.
        """
        rows_BRD = self.hidden_rows(batch.token_BT)[:, 1:]
        total, hits, count = self._mean_loss(batch, rows_BRD)
        if self.config.prompt_weight:
            prompt = replace(batch, loss_BT=batch.is_token_BT & ~batch.loss_BT)
            total = total + self.config.prompt_weight * self._mean_loss(prompt, rows_BRD)[0]
        return total, {"correct_K": hits[None], "count_K": count[None]}

    def _mean_loss(self, batch: Batch, rows_BRD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the mean loss of the labelled tokens, their top-1 hits, and their number."""
        label_BR = self.labels(batch, 1)[..., 0]
        b, t = (label_BR != IGNORED).nonzero(as_tuple=True)
        label_R, out = label_BR[b, t], self.output_rows(rows_BRD[b, t])
        target_RF = None if batch.feature_BTF is None else batch.feature_BTF[b, t + 1]
        weight_R = torch.full(label_R.shape, 1 / max(len(b), 1), device=b.device)
        loss, is_top_R = self.cross_entropy(
            out, label_R, weight_R, target_RF, self.config.soft_weight
        )
        return loss, is_top_R.sum(), torch.tensor(len(b), device=b.device)

    @torch.no_grad()
    def guesses(self, batch: Batch, top_k: int) -> tuple[Tensor, Tensor]:
        """Returns the top guesses at every row, along the true tokens: token ids i64 and
        log-probabilities f32, both [B, T-1, num_guesses, top_k]."""
        rows_BRD = self.hidden_rows(batch.token_BT)[:, 1:]
        ids, log_probs = self.top_guesses(rows_BRD, self.output_rows, top_k)
        R, K = rows_BRD.shape[1], self.config.num_guesses
        # guess k of row t is guess 0 of row t + k; past the end the last row stands in
        row_RK = torch.arange(R)[:, None] + torch.arange(K)
        row_RK = row_RK.clamp(max=R - 1).to(ids.device)
        return ids[:, row_RK], log_probs[:, row_RK]

    def export(self, target: decoder.DecoderConfig) -> dict[str, ir.Model]:
        """Returns the graph "drafter" in the contiguous form: see `_export`."""
        dims = self.layer_dims
        config = replace(
            target,
            hidden_size=dims.hidden_size,
            num_layers=self.config.layers,
            num_heads=dims.num_heads,
            num_kv_heads=dims.num_kv_heads,
            taps=(),
            layers=(),
        )
        return _export(_TrainedGraph(self, config), config, self.head_VD.dtype)


class _TrainedGraph(CachedGraph):
    """The graph "drafter" of a model trained here: rows over a cache, top-k guesses out."""

    embed_Vd: Tensor
    head_Vd: Tensor

    def __init__(self, drafter: Drafter, config: decoder.DecoderConfig) -> None:
        super().__init__(drafter, drafter.layers, config)
        self.norm = decoder.RMSNorm(drafter.final_norm, config.norm_eps)
        with torch.no_grad():
            self.register_buffer("embed_Vd", drafter.embed_VD @ drafter.project_in)
            self.register_buffer("head_Vd", drafter.head_VD @ drafter.project_out.t())

    def forward(self, input_ids: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
        drafter = self.drafter
        rows, caches = self.run_layers(F.embedding(input_ids, self.embed_Vd), inputs)
        rows_Md = self.norm(rows).view(-1, self.embed_Vd.shape[1])
        logits_MV = F.linear(rows_Md, self.head_Vd)
        return (*drafter.top_tokens(logits_MV, drafter.config.top_k), *caches)


class Pretrained:
    """A causal LM with the target's vocabulary, used as it is; only `config`'s drafting fields
    count."""

    is_one_pass = False
    shares_target_cache = False
    mixes_rows = False
    is_whole_model = True
    fusion = None

    def __init__(self, backbone: decoder.Backbone, vocab_size: int, config: Config) -> None:
        """`vocab_size` is the target's. Higher ids, the padding of the model's table, are never
        guessed; those of the target's own padding may be missing in it."""
        self.config = config
        self.backbone, self._vocab_size = backbone, vocab_size
        backbone.embedding.is_bounded = len(backbone.embedding.weight) < vocab_size

    def parameters(self) -> Iterator[Tensor]:
        """Returns all its weights: it shares none with the target."""
        return self.backbone.parameters()

    def runtime_config(self) -> dict[str, Any]:
        """Returns what the proposer reads: see `spec_runtime/proposers/draft_model.py`."""
        return level_config(self.config)

    def export(self, target: decoder.DecoderConfig) -> dict[str, ir.Model]:
        """Returns the graph "drafter" in the contiguous form: see `_export`."""
        backbone = self.backbone
        graph = _PretrainedGraph(backbone, self._vocab_size, self.config.top_k)
        return _export(graph, backbone.config, backbone.dtype)


class _PretrainedGraph(nn.Module):
    """The graph "drafter" of a `Pretrained` model: a backbone whose outputs are its best tokens
    instead of logits and features."""

    def __init__(self, backbone: decoder.Backbone, vocab_size: int, top_k: int) -> None:
        super().__init__()
        self.backbone, self.vocab_size, self.top_k = backbone, vocab_size, top_k

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        logits_MV, _, *caches = self.backbone(*inputs)
        if self.vocab_size < logits_MV.shape[1]:
            logits_MV = logits_MV[:, : self.vocab_size]
        top = torch.log_softmax(logits_MV, -1).topk(self.top_k, dim=-1)
        return (top.indices, top.values, *caches)


def require_same_tokens(
    target_ids: dict[str, int], model_ids: dict[str, int], rows: int, mask_id: int | None = None
) -> None:
    """Raises UserError unless both vocabularies, token -> id, have the same tokens but for a mask,
    and the model's embedding of `rows` rows has them all."""
    expected, got = ({i: token for token, i in ids.items()} for ids in (target_ids, model_ids))
    for i in sorted(expected | got):
        if i != mask_id and expected.get(i) != got.get(i):
            raise UserError(
                f"got a draft model whose token {i} is {got.get(i)!r:.80}, expected the target's "
                f"{expected.get(i)!r:.80}: both need one vocabulary"
            )
    if max(expected) >= rows:
        raise UserError(
            f"got a draft model with {rows} embeddings, expected the target's {max(expected) + 1}"
        )


def _export(
    graph: nn.Module, config: decoder.DecoderConfig, dtype: torch.dtype
) -> dict[str, ir.Model]:
    """Returns the graph "drafter" in the contiguous form.

    Its inputs are input_ids i64[1,N], position_ids, mask, logit_rows i64[M] and the caches; its
    outputs guess_ids i64[M,C], guess_log_probs f32[M,C] and the caches.
    """
    outputs = ["guess_ids", "guess_log_probs"]
    model = export_cached(graph, config, dtype, outputs, "draft_model")
    return {"drafter": model}
