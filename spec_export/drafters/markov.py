"""Lets a guess of a one-pass drafter read the guess before it, through a bias of low rank.

The guesses of a one-pass drafter do not know each other: guess k + 1 has one distribution q,
whatever guess k is. The bias adds to the logit of candidate c after token p

    b(p, c) = H_c · W_B · a(p),    a(p) = W_A · E_p,

with E the target's embedding and H the LM head, both frozen, and W_A and W_B of rank r. In training
this is an addition to the row that the head reads, h' = h + W_B · a(p), so that every loss stays as
it is. With `reads_hidden` a(p) = SiLU(W_A · E_p + W_h · h): the bias depends on the context too.

When drafting, guess k's candidates p are known only after the run. So the graph gives the
log-probability of every candidate c after every p. It does not know the bias of tokens that are no
candidates, and takes each to be m(p), which makes the sum over the vocabulary one over candidates:

    P(c|p) = q_c e^b(p,c) / (Σ_kept q_c' e^b(p,c') + (1 − Σ_kept q_c') e^m(p)),
    e^m(p) = the mean of e^b(p,c) over the draft vocabulary.

Training cannot see a constant on all b(p, ·), for softmax does not; here it cancels, too. With 0 or
the mean of b in the place of m(p), candidates get far too much: e^b is convex, so that a bias that
varies adds to what the other tokens have. With `reads_hidden`, m(p) is that of SiLU(W_A · E_p).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spec_export.drafters.losses import IGNORED
from spec_runtime.errors import UserError

MOST_AVERAGED = 8192  # tokens of the vocabulary, over which a bias is averaged


def require_rank(rank: int, reads_hidden: bool, num_guesses: int) -> None:
    """Raises UserError unless a drafter of `num_guesses` guesses can have a bias of this rank."""
    if rank < 0:
        raise UserError(f"got markov_rank {rank}, expected 0 for no bias, or a rank such as 256")
    if rank and num_guesses < 2:
        raise UserError(
            f"got markov_rank {rank} with one guess, expected two or more: the bias leads from a "
            "guess to the next"
        )
    if reads_hidden and not rank:
        raise UserError("got markov_reads_hidden without a markov_rank: set a rank such as 256")


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
        """Returns h' [..., D] of `rows` h [..., D] after previous_token i64[...]; rows whose
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
        return silu(a + rows.to(a.dtype) @ self.read_hidden)


class CandidateTables(nn.Module):
    """Conditions the candidates of K guesses on those of the guess before, without a product of the
    vocabulary's size.

    W_A · E, H · W_B and m are made once for the draft vocabulary's tokens, f32[Vd, r], f32[Vd, r]
    and f32[Vd, 1], so that a pair of candidates is a product of two of their rows. `embed_VD` and
    `head_VD` hold the rows of the draft vocabulary; head_VD may also be the heads of guesses
    1 … K − 1 one below the other, f32[(K − 1)·Vd, D], where each guess has a head of its own; so
    are H · W_B and m then. H · W_B is centred, which keeps numbers small in half precision. Graphs
    are traced from this module.
    """

    read_VR: Tensor
    write_VR: Tensor
    mean_V1: Tensor

    def __init__(self, bias: MarkovBias, embed_VD: Tensor, head_VD: Tensor) -> None:
        super().__init__()
        self.has_own_heads = len(head_VD) > len(embed_VD)
        write = bias.write.detach()
        read_VR = embed_VD.to(write.dtype) @ bias.read.detach()
        heads = (head_VD.detach().to(write.dtype) @ write.t()).split(len(embed_VD))
        heads = tuple(head - head.mean(0) for head in heads)
        a_VR = read_VR if bias.read_hidden is None else silu(read_VR)
        self.register_buffer("read_VR", read_VR)
        self.register_buffer("write_VR", torch.cat(heads))
        self.register_buffer("mean_V1", torch.cat([mean_biases(a_VR, head) for head in heads]))
        self.read_hidden = bias.read_hidden

    def forward(self, rows: Tensor, index: Tensor, log_prob: Tensor) -> Tensor:
        """Returns the log-probability [..., K-1, C, C] of candidate c of guess k + 1 after
        candidate p of guess k, entry [k, p, c].

        rows [..., K, D] are what the head reads, without a bias. index i64[..., K, C] are the
        candidates' rows of the tables, log_prob f32[..., K, C] their log-probabilities without a
        bias.
        """
        before, behind = index[..., :-1, :], index[..., 1:, :]
        a = F.embedding(before, self.read_VR)
        if self.read_hidden is not None:
            # a product of rank 3, as the quantised forms want it
            added = rows[..., 1:, :].to(a.dtype).unsqueeze(0) @ self.read_hidden
            a = silu(a + added.squeeze(0).unsqueeze(-2))
        if self.has_own_heads:
            K = index.shape[-2]
            first = (torch.arange(K - 1, device=index.device) * len(self.read_VR))[:, None]
            before, behind = before + first, behind + first
        b = a @ F.embedding(behind, self.write_VR).transpose(-1, -2)
        b = b - F.embedding(before, self.mean_V1)
        return conditioned_log_probs(log_prob[..., 1:, :], b.float())


def mean_biases(a_VR: Tensor, write_VR: Tensor) -> Tensor:
    """Returns m(p) of the module docstring for each token p, f32[Vd, 1], from the rows a(p) and
    H · W_B. Of more than `MOST_AVERAGED` tokens the mean is over evenly spaced ones."""
    some_VR = write_VR[:: -(-len(write_VR) // MOST_AVERAGED)]
    parts = [torch.logsumexp(rows @ some_VR.t(), -1, keepdim=True) for rows in a_VR.split(1024)]
    return torch.cat(parts) - math.log(len(some_VR))


def silu(x: Tensor) -> Tensor:
    """Returns SiLU(x), in operators that have kernels everywhere."""
    return x * torch.sigmoid(x)


def conditioned_log_probs(log_prob: Tensor, bias: Tensor) -> Tensor:
    """Returns log P(c|p) f32[..., C, C] of the module docstring, from the log-probabilities
    f32[..., C] of the candidates kept and their bias f32[..., C, C], less m(p), entry [p, c].

    The tail, what the candidates leave of q, is one more candidate, whose bias less m(p) is 0.
    """
    # rounding may bring the sum of all candidates above 1
    tail = torch.log((1 - log_prob.exp().sum(-1, keepdim=True)).clamp(min=1e-9))
    C = log_prob.shape[-1]
    tail = tail.unsqueeze(-2).expand(*log_prob.shape[:-1], C, 1)
    biased = log_prob.unsqueeze(-2) + bias
    return torch.log_softmax(torch.cat((biased, tail), -1), -1)[..., :C]
