"""Defines Medusa: K heads on the target's final hidden state, each guessing one token further.

    q^(k)_t = softmax(W2^(k) · (SiLU(W1^(k) h_t) + h_t)),  k = 1 … K,
    L = Σ_k λ_k · mean[−log q^(k)_t(y_{t+k+1})],  λ_k = decay^k

Head k guesses token t + k + 1, because the target's own head has given token t + 1; elsewhere in
this code it is guess k − 1. W1 starts at 0. W2 is the target's LM head, frozen and shared, or a
copy of it that learns.
"""

from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor, nn

from spec_export.drafters.fields import AtLeastOne, Heads, NoTaps, Share
from spec_export.drafters.heads import HeadsDrafter
from spec_export.drafters.layers import Batch
from spec_export.drafters.losses import position_weights
from spec_export.graphs.trace import GraphInput, export
from spec_export.model import decoder
from spec_export.model.ends import TargetEnds
from spec_runtime.files.mapping import Checked


@dataclass(frozen=True)
class Config(Checked):
    """The settings of Medusa.

    There are `num_heads` K heads of `num_layers` residual blocks, which with `bias` add one to W1,
    as in Medusa's own files. `heads` is "shared" (the target's
    LM head) or "own" (a trained copy for each). They read only the final feature: `taps` stays
    empty. `soft_weight` is the share of the target's distribution in the labels.
    """

    num_heads: AtLeastOne = 4
    num_layers: AtLeastOne = 1
    bias: bool = False
    heads: Heads = "shared"
    taps: NoTaps = ()
    top_k: AtLeastOne = 10
    decay: float = 0.8
    soft_weight: Share = 0.0


class Drafter(HeadsDrafter):
    """The trained part: the residual blocks, and the output heads if it has its own."""

    config: Config

    def __init__(
        self, config: Config, ends: TargetEnds, draft_token_ids: Tensor | None = None
    ) -> None:
        super().__init__(
            config,
            ends,
            draft_token_ids,
            num_blocks=config.num_layers,
            has_bias=config.bias,
            weight_K=position_weights(config.num_heads + 1, config.decay)[1:],
            soft_weight=config.soft_weight,
        )

    def head_rows(self, batch: Batch, at: tuple[Tensor, Tensor]) -> Tensor:
        assert batch.feature_BTF is not None, "heads read features"
        feature_NF = batch.feature_BTF[at].float()  # which may have taps for others
        return self.blocks_of(feature_NF[:, : self.dims.hidden_size])

    def blocks_of(self, hidden_ND: Tensor) -> Tensor:
        """Runs every head's blocks on the same rows [N, D]; returns [N, K, D]."""
        return torch.stack([block(hidden_ND) for block in self.blocks], dim=-2)

    def runtime_config(self) -> dict[str, Any]:
        """Returns what the manifest says of the drafter."""
        return {"num_guesses": self.config.num_heads, "top_k": self.config.top_k}

    def export(self, target: decoder.DecoderConfig) -> dict[str, ir.Model]:
        """Returns the stateless graph "drafter".

        Its input is features f32[1, D] of the last committed position; its outputs are guess_ids
        i64[K, C] and guess_log_probs f32[K, C], and with a table of bigrams pair_log_probs
        f32[K-1, C, C].
        """
        features = GraphInput("features", torch.zeros(1, self.dims.hidden_size), {})
        graph = _DrafterGraph(self)
        return {"drafter": export(graph, [features], self.output_names(), "medusa")}


class _DrafterGraph(nn.Module):
    """The graph "drafter": all heads on one feature row, top-k guesses out."""

    def __init__(self, drafter: Drafter) -> None:
        super().__init__()
        self.drafter = drafter

    def forward(self, features: Tensor) -> tuple[Tensor, ...]:
        # products of rank 3, as the quantised forms want them
        rows_1KD = self.drafter.blocks_of(features[None])[0]
        return tuple(self.drafter.graph_outputs(rows_1KD))
