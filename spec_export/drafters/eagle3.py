"""Defines EAGLE-3: decoder layers that go on from a mixture of three of the target's layers.

Real row t reads x_t, the *fusion* of the target's taps at position t, beside the embedding of token
t+1. Its output goes through a norm and an LM head of the drafter's own, which gives guess 0, token
t+2, and is what the next row reads in place of a fusion:

    x_t = fc([h_a ; h_b ; h_c])                                     taps a, b, c at position t
    [q k v] = W [norm(e(token t+1)) ; norm(x_t)]
    y = x_t + W_o attention,   out = y + mlp(norm(y))
    q_{t+1} = softmax(head · norm(out)),   x of the next row = out

    L = Σ_k decay^k · CE(p_{t+1+k}, q_{t+1+k}),     p the target's distribution

Nothing is regressed. Training unrolls the drafter on its own outputs for `ttt_steps` rows along the
true tokens ("training-time test"). Fusion and its weights are run by the target's graph, once for
each of its rows. The drafters that others have published differ in a few norms and sizes, which are
fields of `Config`; their names are those of the `speculators` library.
"""

from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spec_export.drafters.fields import AtLeastOne, Share
from spec_export.drafters.layers import Batch, CachedGraph, DecoderLayer
from spec_export.drafters.losses import IGNORED, position_weights
from spec_export.drafters.rollout import FusedConfig, FusedDrafter
from spec_export.model import decoder
from spec_export.model.ends import TargetEnds
from spec_runtime.errors import UserError


@dataclass(frozen=True)
class LayersConfig(FusedConfig):
    """The settings of EAGLE-3's layers, which P-EAGLE's are too; see FusedConfig.

    - `fc_norm`: each tap is normed before fc; `norm_before_fc`: all of them together.
    - `norm_before_residual`: layer 0 adds to the normed x.
    """

    layers: AtLeastOne = 1
    top_k: AtLeastOne = 10
    fc_norm: bool = False
    norm_before_fc: bool = False
    norm_before_residual: bool = False
    soft_weight: Share = 1.0
    decay: float = 0.8

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fc_norm and self.norm_before_fc:
            raise UserError("got fc_norm with norm_before_fc, expected at most one of them")


@dataclass(frozen=True)
class Config(LayersConfig):
    """The settings of EAGLE-3: those of its layers, see LayersConfig, and of its levels.

    `num_guesses` levels are drafted, and `max_width` nodes expanded in each; `ttt_steps` are
    trained. norm_output: the next row reads the normed output, which the head reads. A window
    counts positions at every level, as vLLM has it; `speculators` trains each with level 0's.
    """

    num_guesses: AtLeastOne = 5
    max_width: AtLeastOne = 8
    norm_output: bool = False
    ttt_steps: AtLeastOne = 3


class Drafter(FusedDrafter):
    """The trained part: fusion, layers, norm and head; see DrafterBase for what it borrows."""

    config: Config

    def __init__(
        self, config: Config, ends: TargetEnds, draft_token_ids: Tensor | None = None
    ) -> None:
        super().__init__(config, ends, draft_token_ids)
        norms = "each" if config.fc_norm else "all" if config.norm_before_fc else "none"
        first = FirstLayer(self.dims, config)
        others = [
            DecoderLayer(self.dims, qk_norms=config.qk_norms, window=config.window_of(i))
            for i in range(1, config.layers)
        ]
        self.add_parts(ends, [first, *others], norms)

    @property
    def trains_output_head(self) -> bool:
        return True

    @property
    def trained_levels(self) -> int:
        """The levels whose guesses have a loss."""
        return self.config.ttt_steps

    # ---- rows ------------------------------------------------------------------------------------

    def input_rows(self, embedding: Tensor, feature: Tensor) -> tuple[Tensor, Tensor]:
        return embedding, feature

    def next_feature(self, predicted: Tensor) -> Tensor:
        return self.output_rows(predicted) if self.config.norm_output else predicted

    def levels(self, batch: Batch, num_levels: int) -> list[Tensor]:
        """Returns each level's output [B, T-1, D], along the true tokens; see `rollout`."""
        assert batch.feature_BTF is not None, "EAGLE-3 reads taps"
        assert self.fusion is not None
        _, *taps = batch.feature_BTF.split(self.head_VD.shape[1], -1)
        return self.rollout(batch, self.fusion(taps), num_levels)

    def loss(
        self, batch: Batch, generator: torch.Generator | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the loss of a batch, f32 scalar, and each trained guess's top-1 hits `correct_K`
        and labelled rows `count_K`, i64[K]; nothing is random.

        A guess's loss is a mean over the rows whose token is an answer's and in the draft
        vocabulary.
        """
        K = self.trained_levels
        assert batch.feature_BTF is not None, "EAGLE-3 reads taps"
        label_BRK = self.labels(batch, K)
        b, t, k = (label_BRK != IGNORED).nonzero(as_tuple=True)
        rows_BRKD = torch.stack(self.levels(batch, K), 2)
        return self.loss_of_guesses(
            self.output_rows(rows_BRKD[b, t, k]),
            label_BRK[b, t, k],
            k,
            position_weights(K, self.config.decay),
            batch.feature_BTF[b, t + 1 + k],
            self.head,
        )

    @torch.no_grad()
    def guesses(self, batch: Batch, top_k: int) -> tuple[Tensor, Tensor]:
        """Returns the top guesses at every real row, along the true tokens: token ids i64 and
        log-probabilities f32, both [B, T-1, num_guesses, top_k]."""
        rows = torch.stack(self.levels(batch, self.config.num_guesses), dim=2)
        return self.top_guesses(rows, self.output_rows, top_k, self.head)

    # ---- export ----------------------------------------------------------------------------------

    def export(self, target: decoder.DecoderConfig) -> dict[str, ir.Model]:
        """Returns the graph "drafter" in the contiguous form.

        Its inputs are input_ids i64[1,N], features f32[1,N,D] (fused taps, or the `hidden` of a
        node's parent), position_ids, mask, logit_rows i64[M] and the caches; its outputs guess_ids
        i64[M,C], guess_log_probs f32[M,C], hidden f32[M,D] and the caches.
        """
        config = self.cache_config(target)
        return self.export_graph(_DrafterGraph(self, config), config, "eagle3")


class FirstLayer(DecoderLayer):
    """The layer whose rows are pairs of embedding and feature, [..., D] each: it norms both, its
    attention reads them side by side, and it adds to the feature."""

    def __init__(self, dims: Any, config: LayersConfig) -> None:
        window = config.window_of(0)
        super().__init__(dims, num_inputs=2, qk_norms=config.qk_norms, window=window)
        self.token_norm = nn.Parameter(torch.ones(dims.hidden_size))
        self.norm_before_residual = config.norm_before_residual

    def load_target_layer(self, tensors: dict[str, Tensor]) -> None:
        """Copies one of the target's own layers; its attention then reads the feature as the
        target's does."""
        super().load_target_layer(tensors)
        of_feature = self.qkv[self.dims.hidden_size :]
        if tensors and tensors["qkv"].shape == of_feature.shape:
            with torch.no_grad():
                of_feature.copy_(tensors["qkv"])

    def project_qkv(self, x: Any) -> tuple[Tensor, Tensor, Tensor]:
        embedding, feature = x
        normed = self.normed(embedding, self.token_norm), self.normed(feature, self.attention_norm)
        return self.heads(torch.cat(normed, -1))

    def finish(self, x: Any, attended: Tensor) -> Tensor:
        _, feature = x
        if self.norm_before_residual:
            feature = self.normed(feature, self.attention_norm)
        return super().finish(feature, attended)

    def traceable(self, config: decoder.DecoderConfig) -> nn.Module:
        return _TraceableFirstLayer(self, super().traceable(config))


class _TraceableFirstLayer(nn.Module):
    """A `FirstLayer` over a cache; `layer` is the same one as an ordinary layer."""

    def __init__(self, first: FirstLayer, layer: Any) -> None:
        super().__init__()
        self.layer = layer
        self.token_norm = decoder.RMSNorm(first.token_norm, first.dims.norm_eps)
        self.norm_before_residual = first.norm_before_residual

    def forward(self, x: Any, past: Any, shared: Any) -> tuple[Tensor, list[Tensor]]:
        embedding, feature = x
        layer, normed = self.layer, self.layer.attention_norm(feature)
        both = torch.cat((self.token_norm(embedding), normed), -1)
        mixed, caches = layer.attention(both, past, shared)
        summed = (normed if self.norm_before_residual else feature) + mixed
        return summed + layer.mlp(layer.mlp_norm(summed)), caches


class _DrafterGraph(CachedGraph):
    """The graph "drafter": rows over a cache, top-k guesses and what the next rows read out."""

    def __init__(self, drafter: Drafter, config: decoder.DecoderConfig) -> None:
        super().__init__(drafter, drafter.layers, config)
        self.norm = decoder.RMSNorm(drafter.norm, config.norm_eps)

    def forward(self, input_ids: Tensor, features: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
        drafter = self.drafter
        pairs = F.embedding(input_ids, drafter.embedding_table), features
        rows, caches = self.run_layers(pairs, inputs)
        rows_MD = rows.view(-1, drafter.dims.hidden_size)
        normed_MD = self.norm(rows_MD)
        hidden_MD = normed_MD if drafter.config.norm_output else rows_MD
        logits_MV = F.linear(normed_MD, drafter.head)
        return (*drafter.top_tokens(logits_MV, drafter.config.top_k), hidden_MD.float(), *caches)
