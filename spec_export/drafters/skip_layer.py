"""Defines skip-layer drafting: the target's first E layers draft for all of them (early exit).

    q(y | x_≤i) = softmax(head · g(x^E_i)),   g(x) = n or n + SiLU(n W) with n = RMSNorm(x),
    L = mean[(1−s) · CE(q, token) + s · CE(q, p)]

x^E_i is the output of layer E at position i, and p is the target's distribution. In this code's
rows, guess k of row t is read at position t + 1 + k: every guess is the same function, one token
on. Only the norm and W learn.

With `exit_layers`, meant for joint training, the loss is LayerSkip's early-exit loss, whose
gradient teaches the target to be done earlier:

    L_t = Σ_{l ∈ C_t} e(l) · CE_l / Σ_{l ∈ C_t} e(l),   e(l) = Σ_{i<l} i = l(l−1)/2

CE_l is the loss above, read after layer l through the same g. C_t are the exits of optimiser step
t: E always, and every R-th of the others in rotation. The paper's sum has the last layer as one
more exit; here that share is [joint]'s backbone_weight : drafter_weight, in which the paper's
common scale of all e(l) is contained. In the paper E rotates with the others.

The graph holds the target's own layers, so it is made from the backbone that the bundle has.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

import onnx_ir as ir
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spec_export.drafters.fields import AtLeastOne, Share
from spec_export.drafters.heads import ResidualBlock
from spec_export.drafters.layers import Batch, DrafterBase, export_cached
from spec_export.drafters.losses import IGNORED
from spec_export.model import decoder
from spec_export.model.ends import TargetEnds
from spec_runtime.errors import UserError
from spec_runtime.files.mapping import Checked


@dataclass(frozen=True)
class Config(Checked):
    """The settings of skip-layer drafting.

    The first `layers` E of the target run for each level, for at most `num_guesses` levels of
    `max_width` nodes. `head` is "target" (the target's head after a norm whose scale is all
    that learns) or "trained" (a residual block more). `exit_layers` are exits that are trained in
    addition to E, every `exit_every`-th (R) of them in a step.
    """

    layers: AtLeastOne = 8
    head: Literal["target", "trained"] = "trained"
    num_guesses: AtLeastOne = 4
    max_width: AtLeastOne = 8
    top_k: AtLeastOne = 10
    soft_weight: Share = 0.5
    exit_layers: tuple[int, ...] = ()
    exit_every: AtLeastOne = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.exit_layers and (min(self.taps) < 2 or len(set(self.taps)) < len(self.taps)):
            raise UserError(
                f"got layers {self.layers} and exit_layers {list(self.exit_layers)}, expected "
                "different layers from 2 on: the loss behind layer 1 has weight 0"
            )
        if self.exit_every > max(1, len(self.exit_layers)):
            raise UserError(
                f"got exit_every {self.exit_every} of {len(self.exit_layers)} exit_layers, "
                "expected at most as many"
            )

    @property
    def taps(self) -> tuple[int, ...]:
        """Returns the target layers whose outputs training reads; the graph computes its own."""
        return (self.layers, *self.exit_layers)


class Drafter(DrafterBase):
    """The trained part: the norm's scale, and the residual block."""

    shares_target_cache = True
    config: Config
    optimizer_step = 0  # t of the module docstring; joint training sets it

    def __init__(
        self, config: Config, ends: TargetEnds, draft_token_ids: Tensor | None = None
    ) -> None:
        super().__init__(config, ends, draft_token_ids)
        self.norm = nn.Parameter(ends.final_norm_D.float().clone())
        if config.head == "trained":
            self.block = ResidualBlock(ends.dims.hidden_size)

    def head_rows(self, exit_rows: Tensor) -> Tensor:
        """Returns g of the rows [..., D]."""
        norm = self.norm.to(exit_rows.dtype)
        normed = F.rms_norm(exit_rows, norm.shape, norm, self.dims.norm_eps)
        return self.block(normed) if self.config.head == "trained" else normed

    def _rows(self, batch: Batch) -> tuple[Tensor, dict[int, Tensor]]:
        """Returns the target's final feature, and the output of each tapped layer, at positions
        1 … T-1: [B, T-1, D] each."""
        assert batch.feature_BTF is not None, "it reads the target's layers"
        final, *exits = batch.feature_BTF[:, 1:].float().split(self.dims.hidden_size, dim=-1)
        return final, dict(zip(self.config.taps, exits, strict=True))

    def exit_shares(self) -> dict[int, float]:
        """Returns the exits of this step, E first, and their shares of the loss.

        With E = 2 and exit_layers (3, 4), one a step: {2: 1/4, 3: 3/4}, then {2: 1/7, 4: 6/7}.
        """
        c = self.config
        active = [c.layers, *c.exit_layers[self.optimizer_step % c.exit_every :: c.exit_every]]
        if len(active) == 1:
            return {c.layers: 1.0}
        scale = {layer: layer * (layer - 1) / 2 for layer in active}
        return {layer: e / sum(scale.values()) for layer, e in scale.items()}

    def loss(
        self, batch: Batch, generator: torch.Generator | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the loss of a batch, f32 scalar, and each guess's top-1 hits `correct_K` and
        labelled rows `count_K`, i64[K]: guess k counts the rows from k on."""
        final_BRD, exits = self._rows(batch)
        label_BR = self.labels(batch, 1)[..., 0]
        keep_BR = label_BR != IGNORED
        label_N, final_ND = label_BR[keep_BR], final_BRD[keep_BR]
        loss, hits = final_ND.new_zeros(()), []
        for layer, share in self.exit_shares().items():
            rows_ND = self.head_rows(exits[layer][keep_BR])
            weight_N = torch.full_like(label_N, share / max(len(label_N), 1), dtype=torch.float32)
            part, is_top_N = self.cross_entropy(
                rows_ND, label_N, weight_N, final_ND, self.config.soft_weight
            )
            loss = loss + part
            hits.append(is_top_N)
        hit_BR = torch.zeros_like(keep_BR)
        hit_BR[keep_BR] = hits[0]  # those of exit E
        starts = range(self.config.num_guesses)
        correct_K = torch.stack([hit_BR[:, k:].sum() for k in starts])
        return loss, {
            "correct_K": correct_K,
            "count_K": torch.stack([keep_BR[:, k:].sum() for k in starts]),
        }

    @torch.no_grad()
    def guesses(self, batch: Batch, top_k: int) -> tuple[Tensor, Tensor]:
        """Returns the top guesses at every row: token ids i64 and log-probabilities f32, both
        [B, T-1, K, top_k]; zeros past the end."""
        at_exit_BRD = self._rows(batch)[1][self.config.layers]
        ids, log_probs = self.top_guesses(at_exit_BRD, self.head_rows, top_k)
        K = self.config.num_guesses
        ahead = (F.pad(x, (0, 0, 0, K - 1)).unfold(1, K, 1) for x in (ids, log_probs))
        ids, log_probs = (x.transpose(-1, -2) for x in ahead)
        return ids, log_probs

    def runtime_config(self) -> dict[str, Any]:
        """Returns what the proposer reads: see `spec_runtime/proposers/skip_layer.py`."""
        names = ("layers", "head", "num_guesses", "max_width", "top_k")
        return {name: getattr(self.config, name) for name in names}

    def export_from_target(self, backbone: decoder.Backbone) -> dict[str, ir.Model]:
        """Returns the graph "drafter" in the contiguous form.

        Its inputs are the backbone's with the caches of E layers; its outputs guess_ids i64[M, C],
        guess_log_probs f32[M, C] and the caches. Raises UserError unless E is less than the
        target's number of layers.
        """
        if self.config.layers >= backbone.config.num_layers:
            raise UserError(
                f"got layers {self.config.layers}, expected fewer than the target's "
                f"{backbone.config.num_layers}"
            )
        E = self.config.layers
        kinds = backbone.config.kinds[:E]
        config = replace(backbone.config, num_layers=E, taps=(), layers=kinds)
        graph = export_cached(
            _DrafterGraph(self, backbone),
            config,
            backbone.dtype,
            self.output_names(),
            "skip_layer",
        )
        return {"drafter": graph}


class _DrafterGraph(nn.Module):
    """The graph "drafter": the target's first E layers, then g and the LM head."""

    def __init__(self, drafter: Drafter, backbone: decoder.Backbone) -> None:
        super().__init__()
        self.drafter, self.backbone = drafter, backbone

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        mask: Tensor,
        logit_rows: Tensor,
        write_index: Tensor,
        src: Tensor,
        perm: Tensor,
        *kv: Tensor,
    ) -> tuple[Tensor, ...]:
        shared = self.backbone.shared_inputs(position_ids, mask, write_index, src, perm)
        num_layers = self.drafter.config.layers
        states, caches = self.backbone.run_layers(input_ids, kv, shared, num_layers)
        rows_MD = self.drafter.head_rows(states[-1].index_select(0, logit_rows).float())
        logits_MV = F.linear(rows_MD, self.drafter.head_VD)
        return (*self.drafter.top_tokens(logits_MV, self.drafter.config.top_k), *caches)
