"""Provides what drafters that run level by level share: teacher-forced training and two graphs.

Such a drafter makes a state of the target's feature h_t (`start`) and takes it down a path token by
token (`step`), the root x_{t+1} first; each step guesses the next token. In training row t of a
batch walks the true path x_{t+1} … x_{t+K}, and guess k, from 0, is about token t+2+k.

Inputs are scaled to a root mean square of 1 before any weight: an embedding's entries are a hundred
times smaller than a feature's, and weights of one size cannot serve both.
"""

from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spec_export.drafters.fields import AtLeastOne, NoTaps, Share
from spec_export.drafters.layers import Batch, DrafterBase
from spec_export.drafters.losses import IGNORED
from spec_export.graphs.trace import GraphInput, export
from spec_export.model import decoder
from spec_export.model.ends import TargetEnds
from spec_runtime.files.mapping import Checked


@dataclass(frozen=True)
class SequentialConfig(Checked):
    """The fields that all such drafters have.

    There are `num_guesses` levels K; at most `max_width` nodes of a level are expanded;
    `soft_weight` is the share of the target's distribution in the labels.
    """

    num_guesses: AtLeastOne = 4
    max_width: AtLeastOne = 4
    soft_weight: Share = 0.0
    taps: NoTaps = ()
    top_k: AtLeastOne = 10


class SequentialDrafter(DrafterBase):
    """The base of drafters that run level by level; a subclass defines `start` and `step`."""

    config: Any  # a SequentialConfig
    ones_D: Tensor
    zeros_W: Tensor

    def __init__(self, config: Any, ends: TargetEnds, draft_token_ids: Tensor | None) -> None:
        super().__init__(config, ends, draft_token_ids)
        self.register_buffer("ones_D", torch.ones(ends.dims.hidden_size), persistent=False)

    def begin_with_zeros(self, num_columns: int) -> None:
        """Makes the zeros that `with_zeros` puts after a state's first part.

        They are a buffer, which becomes a constant of the graph, because ONNX Runtime has no kernel
        for Pad in bfloat16 on any provider.
        """
        self.register_buffer("zeros_W", torch.zeros(num_columns), persistent=False)

    def with_zeros(self, x: Tensor) -> Tensor:
        """Returns x [R, ...] with the zeros after each row."""
        return torch.cat((x, self.zeros_W.expand(len(x), -1)), -1)

    # ---- the network -----------------------------------------------------------------------------

    def start(self, context_RD: Tensor) -> Tensor:
        """Returns the state f32[R, W] before the root, from features [R, D]."""
        raise NotImplementedError

    def step(self, token_R: Tensor, state_RW: Tensor, level: Tensor) -> tuple[Tensor, Tensor]:
        """Goes one token further; returns what `logits` reads, [R, …], and the next state [R, W].

        `level` i64[1] is 0 at the root.
        """
        raise NotImplementedError

    def context(self, batch: Batch) -> Tensor:
        """Returns what `start` reads at rows 0 … T-2, [B, T-1, D]: the target's final features."""
        assert batch.feature_BTF is not None, "no features"
        return batch.feature_BTF[:, :-1, : self.dims.hidden_size]

    def path_rows(self, context_RD: Tensor, token_RK: Tensor) -> Tensor:
        """Returns what `logits` reads along each row's path, [R, K, …]."""
        state, rows = self.start(context_RD), []
        for k, token_R in enumerate(token_RK.unbind(1)):
            row, state = self.step(token_R, state, torch.tensor([k], device=token_R.device))
            rows.append(row)
        return torch.stack(rows, 1)

    def trained_head(self) -> tuple[Tensor, Tensor | None] | None:
        """Returns the output matrix [Vd, E] and the bias [Vd] that learn; None if `logits` reads
        the target's own frozen head."""
        return None

    @property
    def trains_output_head(self) -> bool:
        return self.trained_head() is not None

    def logits(self, rows: Tensor) -> Tensor:
        """Returns logits over the draft vocabulary, [..., Vd]."""
        head, bias = self.trained_head() or (self.head_VD, None)
        logits = F.linear(rows, head.to(rows.dtype))
        return logits if bias is None else logits + bias

    def unit(self, x: Tensor) -> Tensor:
        """Returns x [..., D] in float32, scaled to a root mean square of 1."""
        return F.rms_norm(x.float(), self.ones_D.shape, self.ones_D, self.dims.norm_eps)

    def unit_embedding(self, token: Tensor) -> Tensor:
        """Returns the embeddings of tokens i64[...], scaled to a root mean square of 1:
        f32[..., D]."""
        # quantize.py reads embedding tables by indices [1, N]
        return self.unit(F.embedding(token[None], self.embed_VD))[0]

    # ---- training --------------------------------------------------------------------------------

    def paths(self, batch: Batch) -> Tensor:
        """Returns the tokens that each row walks, i64[B, T-1, K]: t+1 … t+K, 0 past the end.

        Tokens 5 6 7 with K = 2: [[6, 7], [7, 0]].
        """
        K = self.config.num_guesses
        return F.pad(batch.token_BT, (0, K))[:, 1:].unfold(1, K, 1)[
            :, : batch.token_BT.shape[1] - 1
        ]

    def loss(
        self, batch: Batch, generator: torch.Generator | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns Σ_k of guess k's mean cross-entropy, f32 scalar, and each guess's top-1 hits
        `correct_K` and labelled rows `count_K`, i64[K].

        A guess counts wherever it has a label, even if the tokens before it have none: these are
        given.
        """
        label_BRK = self.labels(batch, self.config.num_guesses)
        b, t = (label_BRK != IGNORED).any(-1).nonzero(as_tuple=True)
        rows_RK = self.path_rows(self.context(batch)[b, t], self.paths(batch)[b, t])
        label_RK = label_BRK[b, t]
        row, k = (label_RK != IGNORED).nonzero(as_tuple=True)
        assert batch.feature_BTF is not None, "no features"
        # the target's own row for that guess: guess k of row t is what position t+1+k predicts
        target = batch.feature_BTF[b[row], t[row] + 1 + k]
        weight_K, trained = torch.ones(self.config.num_guesses), self.trained_head() or ()
        return self.loss_of_guesses(
            rows_RK[row, k], label_RK[row, k], k, weight_K, target, *trained
        )

    @torch.no_grad()
    def guesses(self, batch: Batch, top_k: int) -> tuple[Tensor, Tensor]:
        """Returns the top guesses along every row's true path: token ids i64 and log-probabilities
        f32, both [B, T-1, K, top_k]."""

        def logits_of(context_RD: Tensor, token_RK: Tensor) -> Tensor:
            return self.logits(self.path_rows(context_RD, token_RK))

        context, paths = self.context(batch), self.paths(batch)
        rows = [context.flatten(0, 1), paths.flatten(0, 1)]
        ids, log_probs = self.top_in_chunks(logits_of, rows, 1024, top_k)
        return ids.unflatten(0, paths.shape[:2]), log_probs.unflatten(0, paths.shape[:2])

    # ---- export ----------------------------------------------------------------------------------

    def traceable(self) -> tuple[Any, Any]:
        """Returns `start` and `step` for the graphs: functions, or modules whose weights are laid
        out for running."""
        return self.start, self.step

    def export(self, target: decoder.DecoderConfig) -> dict[str, ir.Model]:
        """Returns two stateless graphs.

        "start": features f32[1, D] -> state f32[1, W].
        "step": input_ids i64[N], state f32[N, W], level i64[1] -> guess_ids i64[N, C],
        guess_log_probs f32[N, C], state.out f32[N, W].
        """
        start, step = self.traceable()
        features = GraphInput("features", torch.zeros(1, self.dims.hidden_size), {})
        N = 5  # an example's size, free in the graph: see GraphInput
        state = start(torch.zeros(N, self.dims.hidden_size)).detach()
        inputs = [
            GraphInput("input_ids", torch.zeros(N, dtype=torch.int64), {0: "N"}),
            GraphInput("state", state, {0: "N"}),
            GraphInput("level", torch.zeros(1, dtype=torch.int64), {}),
        ]
        outputs = ["guess_ids", "guess_log_probs", "state.out"]
        return {
            "start": export(_StartGraph(start), [features], ["state"], "start"),
            "step": export(_StepGraph(self, step), inputs, outputs, "step"),
        }


class _StartGraph(nn.Module):
    """The graph "start": one feature row in, its state out."""

    def __init__(self, start: Any) -> None:
        super().__init__()
        self.start = start

    def forward(self, feature_1D: Tensor) -> tuple[Tensor]:
        return (self.start(feature_1D),)


class _StepGraph(nn.Module):
    """The graph "step": tokens and states in, top-k guesses and next states out."""

    def __init__(self, drafter: SequentialDrafter, step: Any) -> None:
        super().__init__()
        self.drafter, self.step = drafter, step

    def forward(self, token_N: Tensor, state_NW: Tensor, level: Tensor) -> tuple[Tensor, ...]:
        rows, state_NW = self.step(token_N, state_NW, level)
        drafter = self.drafter
        return (*drafter.top_tokens(drafter.logits(rows), drafter.config.top_k), state_NW)
