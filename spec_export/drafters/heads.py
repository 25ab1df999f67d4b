"""Provides what drafters with one head per guess share: residual blocks, output heads, their loss.

A drafter makes a hidden row for each guess k. Residual blocks and an output head, a trained one or
the target's, turn it into a distribution q_k. The loss is

    L = Σ_k weight_k · mean over rows of [(1−s) · CE(q_k, token) + s · CE(q_k, p)]

with p the target's distribution of that token and s the soft weight.
"""

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spec_export.drafters.layers import Batch, DrafterBase
from spec_export.drafters.losses import IGNORED
from spec_export.model.ends import TargetEnds


class ResidualBlock(nn.Module):
    """Computes x + SiLU(x · W + b). W and b start at 0, so that a new block changes nothing; most
    blocks have no b."""

    def __init__(self, size: int, has_bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size, size))
        self.bias = nn.Parameter(torch.zeros(size)) if has_bias else None

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.weight
        if self.bias is not None:
            y = y + self.bias
        return x.to(y.dtype) + y * torch.sigmoid(y)


class HeadsDrafter(DrafterBase):
    """The base of drafters with one head per guess.

    `config` has `num_heads` K, `top_k` and `heads`: "own" is an output head per guess, which starts
    as the target's; "shared" is the target's, frozen. weight_K f32[K] and soft_weight are those of
    the module docstring.
    """

    is_one_pass = True
    weight_K: Tensor
    output_heads: Any  # nn.ParameterList; mypy knows no element type

    def __init__(
        self,
        config: Any,
        ends: TargetEnds,
        draft_token_ids: Tensor | None,
        *,
        num_blocks: int,
        has_bias: bool = False,
        weight_K: Tensor,
        soft_weight: float,
    ) -> None:
        super().__init__(config, ends, draft_token_ids)
        self.soft_weight = soft_weight
        self.register_buffer("weight_K", weight_K, persistent=False)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                *(ResidualBlock(ends.dims.hidden_size, has_bias) for _ in range(num_blocks))
            )
            for _ in range(config.num_heads)
        )
        count = config.num_heads if config.heads == "own" else 0
        self.output_heads = nn.ParameterList(self.head_VD.clone() for _ in range(count))

    @property
    def trains_output_head(self) -> bool:
        return len(self.output_heads) > 0

    @abstractmethod
    def head_rows(self, batch: Batch, at: tuple[Tensor, Tensor]) -> Tensor:
        """Returns what the output heads read, [N, K, D], at the rows `at`: batch and row indices,
        i64[N] each."""

    def loss(
        self, batch: Batch, generator: torch.Generator | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the loss of a batch, f32 scalar, and each guess's top-1 hits `correct_K` and
        labelled rows `count_K`, i64[K].

        A guess without a label (past the end, a prompt token, or a token outside the draft
        vocabulary) is ignored, even if other guesses of its row have one.
        """
        assert batch.feature_BTF is not None, "heads read features"
        label_BRK = self.labels(batch, self.config.num_heads)
        b, t = (label_BRK != IGNORED).any(-1).nonzero(as_tuple=True)
        rows_NKD, label_NK = self.head_rows(batch, (b, t)), label_BRK[b, t]
        count_K = (label_NK != IGNORED).sum(0)
        correct_K, loss = torch.zeros_like(count_K), rows_NKD.new_zeros((), dtype=torch.float32)
        for k, weight in enumerate(self.weight_K / count_K.clamp(min=1)):
            keep_N = label_NK[:, k] != IGNORED
            label_R = label_NK[keep_N, k]
            # guess k of row t is what the target's own row t + 1 + k predicts
            target_RF = batch.feature_BTF[b[keep_N], t[keep_N] + 1 + k]
            part, is_top_R = self.cross_entropy(
                rows_NKD[keep_N, k],
                label_R,
                weight.expand(len(label_R)),
                target_RF,
                self.soft_weight,
                self.output_heads[k] if self.output_heads else None,
            )
            loss = loss + part
            correct_K[k] = is_top_R.sum()
        return loss, {"correct_K": correct_K, "count_K": count_K}

    @torch.no_grad()
    def guesses(self, batch: Batch, top_k: int) -> tuple[Tensor, Tensor]:
        """Returns the top guesses at every row: token ids i64 and log-probabilities f32, both
        [B, T-1, K, top_k]. None is conditioned on the guess before it."""
        B, T = batch.token_BT.shape
        b, t = torch.ones(B, T - 1, device=batch.token_BT.device).nonzero(as_tuple=True)
        rows_NKD = self.head_rows(batch, (b, t))
        num_rows = max(1, 4096 // self.config.num_heads)
        ids, log_probs = self.top_in_chunks(self.logits, [rows_NKD], num_rows, top_k)
        return ids.unflatten(0, (B, T - 1)), log_probs.unflatten(0, (B, T - 1))

    def logits(self, rows_NKD: Tensor) -> Tensor:
        """Returns the logits [N, K, Vd] of head rows.

        Graphs are traced from this very function. Without own heads it is one product for all
        guesses.
        """
        if self.output_heads:
            logits = [F.linear(rows_NKD[:, k], head) for k, head in enumerate(self.output_heads)]
            return torch.stack(logits, 1)
        head_VD = self.head_VD.to(rows_NKD.dtype)
        return F.linear(rows_NKD.flatten(0, 1), head_VD).unflatten(0, rows_NKD.shape[:2])

    def graph_outputs(self, rows_1KD: Tensor) -> list[Tensor]:
        """Returns a graph's outputs of one row of heads: guess_ids and guess_log_probs [K, C], and
        with a table of bigrams pair_log_probs [K-1, C, C]."""
        index_KC, log_prob_KC = self.top_draft_tokens(self.logits(rows_1KD)[0], self.config.top_k)
        outputs = [self.draft_token_ids[index_KC], log_prob_KC]
        if self.bigrams is not None:
            outputs.append(self.bigrams(index_KC, log_prob_KC))
        return outputs
