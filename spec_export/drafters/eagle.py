"""Defines EAGLE-1 and EAGLE-2: a decoder layer that predicts the target's next feature.

Real row t reads the feature of position t and token t+1, and its output is the feature of t+1. The
target's LM head, shared and frozen, turns that into guess 0, token t+2. Each further guess is a new
row one position on, which reads the guessed token and the predicted feature, and sees the real rows
up to t and its own path:

    x_t = fc([f_t ; e(token t+1)]) -> f̂_{t+1} -> x = fc([f̂_{t+1} ; e(token t+2)]) -> f̂_{t+2} -> …

    L = w_reg · SmoothL1(f̂_{t+1}, f_{t+1}) + w_cls · CE(p_{t+1}, softmax(LM_head(f̂_{t+1})))

with p_{t+1} the target's distribution (`soft_weight` = 1), and uniform noise on the features that
are read. Features are regressed at every answer token, also at those outside the draft vocabulary,
which have no label: the layer goes on from such features too. As in EAGLE only the first guess is
trained. `ttt_steps` > 1 unrolls the drafter on its own features and adds the later guesses' losses,
weighted by decay^k. Unlike EAGLE's own, the layer has an input norm unless `input_norm` is off,
because it starts from the target's last layer. EAGLE-2 has the same weights; the runtime grows its
tree by path probability.
"""

from dataclasses import dataclass
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
    fusion,
    noisy_features,
    tokens_ahead,
)
from spec_export.drafters.losses import IGNORED, feature_regression
from spec_export.drafters.rollout import OwnSizes, RolloutDrafter, equal_weights
from spec_export.model import decoder
from spec_export.model.ends import TargetEnds


@dataclass(frozen=True)
class Config(OwnSizes):
    """The settings of EAGLE; see OwnSizes.

    `num_guesses` levels are drafted, and `max_width` nodes expanded in each. `normalise` norms
    feature and embedding with gains of their own before fc mixes them. `feature_noise` (EAGLE has
    0.2) is uniform in ± noise / 2 · 512 / sequence length. Without `input_norm` the first layer's
    attention reads what fc makes, as in EAGLE's own files. With `qkv_bias` queries, keys and values
    have biases, as in EAGLE's files for Qwen2.
    """

    layers: AtLeastOne = 1
    num_guesses: AtLeastOne = 5
    max_width: AtLeastOne = 8
    normalise: bool = False
    input_norm: bool = True
    qkv_bias: bool = False
    taps: NoTaps = ()
    top_k: AtLeastOne = 10
    soft_weight: Share = 1.0
    w_reg: float = 1.0
    w_cls: float = 0.1
    feature_noise: NotNegative = 0.2
    ttt_steps: AtLeastOne = 1
    decay: float = 0.8


class Drafter(RolloutDrafter):
    """The trained part: fc and the layers; see DrafterBase for what it borrows."""

    config: Config

    def __init__(
        self, config: Config, ends: TargetEnds, draft_token_ids: Tensor | None = None
    ) -> None:
        super().__init__(config, ends, draft_token_ids)
        D = ends.dims.hidden_size
        if config.normalise:
            self.input_norm = nn.Parameter(torch.tensor([[ends.feature_scale], [1.0]]).repeat(1, D))
        self.fc = fusion(2, D)
        self.fc_bias = nn.Parameter(torch.zeros(D))
        self.layers = nn.ModuleList(
            DecoderLayer(self.dims, input_norm=config.input_norm or i > 0, has_bias=config.qkv_bias)
            for i in range(config.layers)
        )
        for layer in self.layers:
            layer.load_target_layer(ends.last_layer)
            layer.start_as_identity()

    # ---- rows ------------------------------------------------------------------------------------

    def input_rows(self, embedding: Tensor, feature: Tensor) -> Tensor:
        """Returns the layer's input [..., D] from embedding and feature, both [..., D]."""
        x = torch.cat((feature, embedding), -1)
        if self.config.normalise:
            chunks = x.unflatten(-1, (2, -1)).float()
            normed = F.rms_norm(chunks, chunks.shape[-1:], None, self.dims.norm_eps)
            x = (normed * self.input_norm).flatten(-2)
        return F.linear(x, self.fc.t(), self.fc_bias)

    def loss(
        self, batch: Batch, generator: torch.Generator | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the mean loss of a batch, f32 scalar, and each trained guess's top-1 hits
        `correct_K` and labelled rows `count_K`, i64[K].

        The regression is a mean over all rows whose guess is an answer token; the cross-entropy is
        one over those of them whose token is in the draft vocabulary.
        """
        config, feature_BTD = self.config, batch.feature_BTF
        assert feature_BTD is not None, "EAGLE reads features"
        label_BRK = self.labels(batch, config.ttt_steps)
        is_answer_BRK = tokens_ahead(batch.loss_BT, config.ttt_steps, False)
        noisy_BTD = noisy_features(batch, config.feature_noise, generator)
        assert noisy_BTD is not None
        levels = self.rollout(batch, noisy_BTD, config.ttt_steps)
        total, correct, count = feature_BTD.new_zeros((), dtype=torch.float32), [], []
        for k, predicted in enumerate(levels):
            b, t = is_answer_BRK[..., k].nonzero(as_tuple=True)
            rows, feature_RD = predicted[b, t], feature_BTD[b, t + 1 + k].to(predicted.dtype)
            distance = feature_regression(rows, feature_RD, equal_weights(rows))
            label_R = label_BRK[b, t, k]
            keep_R = label_R != IGNORED
            rows, feature_RD, label_R = rows[keep_R], feature_RD[keep_R], label_R[keep_R]
            loss, is_top_R = self.cross_entropy(
                rows, label_R, equal_weights(rows), feature_RD, config.soft_weight
            )
            total = total + config.decay**k * (config.w_cls * loss + config.w_reg * distance)
            correct.append(is_top_R.sum())
            count.append(keep_R.sum())
        return total, {"correct_K": torch.stack(correct), "count_K": torch.stack(count)}

    @torch.no_grad()
    def guesses(self, batch: Batch, top_k: int) -> tuple[Tensor, Tensor]:
        """Returns the top guesses at every real row, along the true tokens: token ids i64 and
        log-probabilities f32, both [B, T-1, num_guesses, top_k]."""
        assert batch.feature_BTF is not None, "EAGLE reads features"
        rows = torch.stack(self.rollout(batch, batch.feature_BTF, self.config.num_guesses), dim=2)
        return self.top_guesses(rows, lambda row: row, top_k)

    # ---- export ----------------------------------------------------------------------------------

    def export(self, target: decoder.DecoderConfig) -> dict[str, ir.Model]:
        """Returns the graph "drafter" in the contiguous form.

        Its inputs are input_ids i64[1,N], features f32[1,N,D], position_ids, mask, logit_rows
        i64[M] and the caches; its outputs guess_ids i64[M,C], guess_log_probs f32[M,C], hidden
        f32[M,D] (the predicted features) and the caches.
        """
        config = self.cache_config(target)
        return self.export_graph(_DrafterGraph(self, config), config, "eagle")


class _DrafterGraph(CachedGraph):
    """The graph "drafter": rows over a cache, top-k guesses and predicted features out."""

    def __init__(self, drafter: Drafter, config: decoder.DecoderConfig) -> None:
        super().__init__(drafter, drafter.layers, config)
        fc = drafter.fc.detach()
        if drafter.config.normalise:
            # the gains are folded into fc, so that one operator norms both
            fc = drafter.input_norm.detach().reshape(-1, 1) * fc
            self.unit_norm = decoder.RMSNorm(torch.ones(config.hidden_size), config.norm_eps)
        self.fc = decoder.Projection(fc.t(), drafter.fc_bias)

    def forward(self, input_ids: Tensor, features: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
        drafter = self.drafter
        D = drafter.dims.hidden_size
        x = torch.cat((features, F.embedding(input_ids, drafter.embed_VD)), -1)
        if drafter.config.normalise:
            x = self.unit_norm(x.view(1, -1, 2, D)).view(1, -1, 2 * D)
        rows, caches = self.run_layers(self.fc(x), inputs)
        hidden_MD = rows.view(-1, D)
        logits_MV = F.linear(hidden_MD, drafter.head_VD)
        return (*drafter.top_tokens(logits_MV, drafter.config.top_k), hidden_MD.float(), *caches)
