"""Lets the guesses of a one-pass drafter know each other by a table of bigrams, without training.

The guesses of a one-pass drafter do not know each other: guess k + 1 has one distribution q,
whatever guess k is. The table, which `training/bigrams.py` counts in answers, says how much more or
less likely candidate c is after candidate p than anywhere,

    b(p, c) = w · log (P(c|p) / P(c)),

and the graph conditions the candidates by it:

    P(c|p) = q_c e^b(p,c) / (Σ_kept q_c' e^b(p,c') + 1 − Σ_kept q_c').

The tokens that are no candidates keep what they have: under P(c) the mean of P(c|p) / P(c) is
1. For its pairs the graph has a hash table, because that takes no branches and no search: pair
(p, c) of a draft vocabulary of Vd tokens is the key p · Vd + c, which lies in one of the H buckets,
number key mod H, of B keys each.
"""

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spec_runtime.errors import UserError

NO_KEY = -1  # fills up a bucket
LOADS = (1, 2, 3, 4, 6, 8)  # mean keys of a bucket that are tried for the smallest table


class BigramPairs(nn.Module):
    """Conditions the candidates of K guesses on those of the guess before by a table of bigrams.

    table: the arrays of bigrams.table, whose tokens are all among draft_token_ids i64[Vd]. Nothing
    is trained here, and nothing of it is in a state dict.
    """

    key_HB: Tensor
    bias_HB: Tensor
    unseen_V1: Tensor

    def __init__(self, table: Mapping[str, np.ndarray], draft_token_ids: Tensor) -> None:
        super().__init__()
        ids = draft_token_ids.cpu().numpy()
        row_V = np.full(1 + max(int(ids.max(initial=0)), _largest(table)), -1)
        row_V[ids] = np.arange(len(ids))
        previous_P, next_P, token_U = (row_V[table[x]] for x in ("previous", "next", "token"))
        if min(_least(previous_P), _least(next_P), _least(token_U)) < 0:
            raise UserError(
                "got a table of bigrams with tokens outside the draft vocabulary, expected the one "
                "that `spec-export train` counted for it"
            )
        unseen_V = np.zeros(len(ids), np.float32)
        unseen_V[token_U] = table["unseen"]
        # a pair's entry holds what it is above the bias of pairs that are not there
        above_P = table["bias"].astype(np.float32) - unseen_V[previous_P]
        key_HB, bias_HB = hashed(previous_P * len(ids) + next_P, above_P)
        self.register_buffer("key_HB", torch.from_numpy(key_HB), persistent=False)
        self.register_buffer("bias_HB", torch.from_numpy(bias_HB), persistent=False)
        self.register_buffer("unseen_V1", torch.from_numpy(unseen_V[:, None]), persistent=False)

    def forward(self, index: Tensor, log_prob: Tensor) -> Tensor:
        """Returns the log-probability [..., K-1, C, C] of candidate c of guess k + 1 after
        candidate p of guess k, entry [k, p, c].

        index i64[..., K, C] are the candidates' rows of the draft vocabulary, log_prob f32[..., K,
        C] their log-probabilities without a bias.
        """
        bias = self.bias(index[..., :-1, :], index[..., 1:, :])
        return conditioned_log_probs(log_prob[..., 1:, :], bias.float())

    def bias(self, before: Tensor, behind: Tensor) -> Tensor:
        """Returns b(p, c) [..., C, C] of the draft vocabulary's rows p i64[..., C] and c alike."""
        key = before.unsqueeze(-1) * len(self.unseen_V1) + behind.unsqueeze(-2)
        bucket = key % torch.tensor(len(self.key_HB))
        is_found = F.embedding(bucket, self.key_HB) == key.unsqueeze(-1)
        above = (is_found.to(self.bias_HB.dtype) * F.embedding(bucket, self.bias_HB)).sum(-1)
        return above + F.embedding(before, self.unseen_V1)


def conditioned_log_probs(log_prob: Tensor, bias: Tensor) -> Tensor:
    """Returns log P(c|p) f32[..., C, C] of the module docstring, from the log-probabilities
    f32[..., C] of the candidates kept and their bias f32[..., C, C], entry [p, c].

    The tail, what the candidates leave of q, is one more candidate, whose bias is 0.
    """
    # rounding may bring the sum of all candidates above 1
    tail = torch.log((1 - log_prob.exp().sum(-1, keepdim=True)).clamp(min=1e-9))
    C = log_prob.shape[-1]
    tail = tail.unsqueeze(-2).expand(*log_prob.shape[:-1], C, 1)
    biased = log_prob.unsqueeze(-2) + bias
    return torch.log_softmax(torch.cat((biased, tail), -1), -1)[..., :C]


def hashed(key_P: np.ndarray, value_P: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns keys i64[H, B] and values f32[H, B] of a hash table of these pairs of keys i64[P],
    which differ and are 0 or more, and values f32[P]: of a few tables tried the smallest. Key k
    lies in bucket k mod H; free places hold NO_KEY and 0."""
    sizes = sorted({_prime_at_least(len(key_P) // load) for load in LOADS})
    fullest = [int(np.bincount(key_P % H, minlength=1).max(initial=1)) for H in sizes]
    H, B = min(zip(sizes, fullest, strict=True), key=lambda shape: shape[0] * shape[1])
    order_P = np.argsort(key_P % H, kind="stable")
    bucket_P = (key_P % H)[order_P]
    place_P = np.arange(len(key_P)) - np.searchsorted(bucket_P, bucket_P)
    key_HB, value_HB = np.full((H, B), NO_KEY), np.zeros((H, B), np.float32)
    key_HB[bucket_P, place_P] = key_P[order_P]
    value_HB[bucket_P, place_P] = value_P[order_P]
    return key_HB, value_HB


def _prime_at_least(number: int) -> int:
    """Returns the least odd prime from `number` on: it shares no factor with a vocabulary's size
    but by chance, so that keys spread evenly."""
    number = max(number, 3) | 1
    while any(number % factor == 0 for factor in range(3, math.isqrt(number) + 1, 2)):
        number += 2
    return number


def _largest(table: Mapping[str, np.ndarray]) -> int:
    names = ("previous", "next", "token")
    return max(int(table[name].max(initial=0)) for name in names)


def _least(numbers: np.ndarray) -> int:
    return int(numbers.min(initial=0))
