"""Lets a guess of a one-pass drafter read the guess before it, through a bias of low rank.

The guesses of a one-pass drafter do not know each other: guess k + 1 has one distribution q,
whatever guess k is. The bias adds to the logit of candidate c behind token p

    b(p, c) = H_c · W_B · a(p),    a(p) = W_A · E_p,

with E the target's embedding and H the LM head, both frozen, and W_A and W_B of rank r. In training
this is an addition to the row that the head reads, h' = h + W_B · a(p), so that every loss stays as
it is. With `reads_hidden` a(p) = SiLU(W_A · E_p + W_h · h): the bias depends on the context too.

When drafting, guess k's candidates p are known only after the run. So the graph gives the
log-probability of every candidate c behind every p. Tokens that are no candidates are taken to have
no bias, which makes the sum over the vocabulary a sum over the candidates:

    P(c|p) = q_c e^b(p,c) / (Σ_kept q_c' e^b(p,c') + 1 − Σ_kept q_c')
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spec_export.drafters.losses import IGNORED


def require_rank(rank: int, reads_hidden: bool, num_guesses: int) -> None:
    """Raises ValueError unless a drafter of `num_guesses` guesses can have a bias of this rank."""
    if rank < 0:
        raise ValueError(f"got markov_rank {rank}, expected 0 for no bias, or a rank such as 256")
    if rank and num_guesses < 2:
        raise ValueError(
            f"got markov_rank {rank} with one guess, expected two or more: the bias leads from a "
            "guess to the next"
        )
    if reads_hidden and not rank:
        raise ValueError("got markov_reads_hidden without a markov_rank: set a rank such as 256")


class MarkovBias(nn.Module):
    """The trained part of the bias: W_A `read` f32[D, r], W_B `write` f32[r, D], which starts at 0,
    and W_h `read_hidden` f32[D, r] with `reads_hidden`, which starts at 0 too.

    embed_VD is the target's embedding. W_A starts such that a(p) is of size 1.
    """

    def __init__(self, rank: int, reads_hidden: bool, embed_VD: Tensor) -> None:
        super().__init__()
        D = embed_VD.shape[1]
        size = embed_VD.float().square().mean().sqrt() * D**0.5  # of a token's embedding
        self.read = nn.Parameter(torch.randn(D, rank) / size)
        self.write = nn.Parameter(torch.zeros(rank, D))
        self.read_hidden = nn.Parameter(torch.zeros(D, rank)) if reads_hidden else None

    def forward(self, rows: Tensor, previous_token: Tensor, embed_VD: Tensor) -> Tensor:
        """Returns h' [..., D] of `rows` h [..., D] behind previous_token i64[...]; rows whose
        previous token is IGNORED stay as they are."""
        added = self.state(rows, embed_VD[previous_token.clamp(min=0)]) @ self.write
        has_previous = (previous_token != IGNORED)[..., None]
        return rows + (added * has_previous).to(rows.dtype)

    def state(self, rows: Tensor, embedding: Tensor) -> Tensor:
        """Returns a(p) [..., r] of the embeddings E_p [..., D], for a guess with `rows` [..., D]
        (which are not read without `reads_hidden`)."""
        a = embedding.to(self.read.dtype) @ self.read
        if self.read_hidden is None:
            return a
        return F.silu(a + rows.to(a.dtype) @ self.read_hidden)
