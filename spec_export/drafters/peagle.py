"""Defines P-EAGLE: EAGLE-3's layers guess K + 1 tokens in one pass, through K mask rows.

Row 0 of a group is EAGLE-3's: it reads the fusion x_t of the target's taps at position t beside the
embedding of token t+1, and guesses token t+2. Mask row d reads what is the same for all masks, the
embedding of `mask_token_id` and the fusion of the trained states `mask_hidden`, is at position t+d,
sees the real rows up to t and its group's masks 1 … d, and guesses token t+2+d:

    x_mask = fc(mask_hidden),   q_{t+1+d} = softmax(head · norm(out_d))

    L = Σ_d decay^d · CE(p_{t+1+d}, q_{t+1+d}),     p the target's distribution

So mask row d is EAGLE-3's level d with constants in place of token and prediction. In the graph
mask d has the id V + d − 1, and whatever feature its row is fed is not read.
"""

from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spec_export.drafters import eagle3
from spec_export.drafters.fields import AtLeastZero
from spec_export.drafters.layers import CachedGraph
from spec_export.model import decoder
from spec_export.model.ends import TargetEnds
from spec_runtime.errors import UserError


@dataclass(frozen=True)
class Config(eagle3.LayersConfig):
    """The settings of P-EAGLE: those of EAGLE-3's layers, see LayersConfig there, and of masks.

    `num_masks` K masks give K+1 guesses. All read the embedding of the token `mask_token_id`.
    """

    num_masks: AtLeastZero = 4
    mask_token_id: AtLeastZero = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sliding_layers and (self.window or 0) < self.num_guesses:
            raise UserError(
                f"got window {self.window}, expected {self.num_guesses} or more: a group's last "
                "mask sees all of the group"
            )

    @property
    def num_guesses(self) -> int:
        return self.num_masks + 1


class Drafter(eagle3.Drafter):
    """The trained part: EAGLE-3's, and the states [taps · D] that mask rows have in place of the
    target's."""

    is_one_pass = True
    config: Any  # this file's Config

    def __init__(
        self, config: Config, ends: TargetEnds, draft_token_ids: Tensor | None = None
    ) -> None:
        super().__init__(config, ends, draft_token_ids)  # type: ignore[arg-type]
        V = len(ends.embed_VD)
        if config.mask_token_id >= V:
            raise UserError(
                f"got mask_token_id {config.mask_token_id}, expected one of the target's {V} tokens"
            )
        self.mask_token_id = config.mask_token_id
        self.mask_hidden = nn.Parameter(torch.randn(len(config.taps) * ends.dims.hidden_size))

    @property
    def trained_levels(self) -> int:
        return int(self.config.num_guesses)

    def mask_feature(self) -> Tensor:
        """Returns the fused feature of every mask row, f32[D]."""
        assert self.fusion is not None
        return self.fusion(self.mask_hidden.chunk(len(self.config.taps)))

    def next_feature(self, predicted: Tensor) -> Tensor:
        return self.mask_feature().to(predicted.dtype).expand_as(predicted)

    def runtime_config(self) -> dict[str, Any]:
        config = self.config
        return self.one_pass_config("features+tokens", config.num_masks, config.num_guesses)

    def export(self, target: decoder.DecoderConfig) -> dict[str, ir.Model]:
        """Returns the graph "drafter" in the contiguous form.

        Its inputs are input_ids i64[1,N], features f32[1,N,D] (fused taps), position_ids, mask,
        logit_rows i64[M] and the caches; its outputs guess_ids i64[M,C], guess_log_probs f32[M,C]
        and the caches. With V = mask_token_base mask d has the id V + d − 1.
        """
        config = self.cache_config(target)
        graph = _DrafterGraph(self, config)
        return self.export_graph(graph, config, "peagle", more_outputs=())


class _DrafterGraph(CachedGraph):
    """The graph "drafter": one chain of rows over a cache, top-k guesses out."""

    mask_feature: Tensor

    def __init__(self, drafter: Drafter, config: decoder.DecoderConfig) -> None:
        super().__init__(drafter, drafter.layers, config)
        self.norm = decoder.RMSNorm(drafter.norm, config.norm_eps)
        self.register_buffer("mask_feature", drafter.mask_feature().detach())

    def forward(self, input_ids: Tensor, features: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
        drafter = self.drafter
        is_mask = input_ids >= len(drafter.embed_VD)
        token = torch.where(is_mask, drafter.config.mask_token_id, input_ids)
        feature = torch.where(is_mask[..., None], self.mask_feature, features)
        pairs = F.embedding(token, drafter.embedding_table), feature
        rows, caches = self.run_layers(pairs, inputs)
        logits_MV = F.linear(self.norm(rows.view(-1, drafter.dims.hidden_size)), drafter.head)
        return (*drafter.one_pass_outputs(logits_MV, drafter.config.num_masks), *caches)
