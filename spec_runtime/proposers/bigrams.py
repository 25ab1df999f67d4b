"""Lets the guesses of a one-pass drafter know each other, by how often tokens follow each other.

A one-pass drafter gives guess k + 1 one distribution q, whatever guess k is. In a tree each
candidate c stands below one parent p, whose token says much about the next. A table that was
counted in the answers that the drafter learnt from holds

    b(p, c) = w · log (P(c|p) / P(c)),

and a candidate's probability below p becomes

    P(c|p, context) = q_c e^b(p,c) / (Σ_kept q_c' e^b(p,c') + 1 − Σ_kept q_c'),

where the tokens that are no candidates keep what they have: under P(c) the mean of P(c|p) / P(c) is
1. The file has the arrays `previous` and `next` i32[P], ascending pairs (p, c), with `bias` f16[P];
and `token` i32[U], ascending, with `unseen` f16[U], the b(p, c) of a token p with every c of which
the table has no pair.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from spec_runtime.bundle import Bundle, BundleError, DrafterInfo
from spec_runtime.mapping import brief
from spec_runtime.trees.guesses import Guesses
from spec_runtime.untrusted.arrays import read_arrays

LEAST = 1e-9  # probability of all tokens that are no candidates


class Bigrams:
    """The table b(p, c): see the module. Raises ValueError if its arrays do not fit together."""

    def __init__(
        self,
        previous_P: np.ndarray,
        next_P: np.ndarray,
        bias_P: np.ndarray,
        token_U: np.ndarray,
        unseen_U: np.ndarray,
    ) -> None:
        key_P = _keys(previous_P, next_P)
        _require_ascending("pairs", key_P, bias_P, np.minimum(previous_P, next_P))
        _require_ascending("tokens", token_U, unseen_U, token_U)
        # a last entry that no pair has, so that every search ends at one
        self._key_P = np.append(key_P, np.iinfo(np.int64).max)
        self._bias_P = np.append(bias_P.astype(np.float32), np.float32(0))
        self._token_U = np.append(token_U.astype(np.int64), np.iinfo(np.int64).max)
        self._unseen_U = np.append(unseen_U.astype(np.float32), np.float32(0))

    @classmethod
    def open(cls, bundle: Bundle, info: DrafterInfo) -> Bigrams | None:
        """Returns the table of a drafter, None if it has none; raises BundleError for a bad one."""
        if info.bigrams is None:
            return None
        path = bundle.file(info.bigrams)
        try:
            return cls.read(path)
        except (ValueError, KeyError, TypeError) as error:
            raise BundleError(
                f"drafter {info.name!r}: {path.name} is no table of bigrams ({brief(error, 120)}); "
                "build the bundle again"
            ) from None

    @classmethod
    def read(cls, path: Path) -> Bigrams:
        """Reads a table. Raises ValueError, KeyError or TypeError for a file that holds none, and
        OSError if it cannot be read."""
        _, arrays = read_arrays(path)
        names = ("previous", "next", "bias", "token", "unseen")
        return cls(*(arrays[name] for name in names))

    def conditioned(self, guesses: Guesses) -> Guesses:
        """Returns the guesses with their pairs by this table; those that have pairs keep them."""
        if guesses.pair_KCC is not None:
            return guesses
        previous_KC1 = guesses.token_KC[:-1, :, None]
        bias_KCC = self.bias(previous_KC1, guesses.token_KC[1:, None, :])
        log_prob_K1C = guesses.log_prob_KC[1:, None, :]
        rest_K11 = 1 - np.exp(log_prob_K1C).sum(-1, keepdims=True)
        weight_KCC = np.exp(log_prob_K1C + bias_KCC)
        sum_KC1 = weight_KCC.sum(-1, keepdims=True) + np.maximum(rest_K11, LEAST)
        pair_KCC = log_prob_K1C + bias_KCC - np.log(sum_KC1)
        return Guesses(guesses.token_KC, guesses.log_prob_KC, pair_KCC.astype(np.float32))

    def bias(self, previous: np.ndarray, following: np.ndarray) -> np.ndarray:
        """Returns b(p, c) f32 of tokens i64 whose shapes broadcast to each other."""
        key = _keys(previous, following)
        place = np.searchsorted(self._key_P[:-1], key)
        row = np.searchsorted(self._token_U[:-1], previous)
        is_known = self._token_U[row] == previous
        unseen = np.where(is_known, self._unseen_U[row], np.float32(0))
        biases: np.ndarray = np.where(self._key_P[place] == key, self._bias_P[place], unseen)
        return biases


def _keys(previous: np.ndarray, following: np.ndarray) -> np.ndarray:
    """Returns one number for each pair of tokens, in the order of the pairs."""
    keys: np.ndarray = (previous.astype(np.int64) << 32) + following.astype(np.int64)
    return keys


def _require_ascending(what: str, key: np.ndarray, value: np.ndarray, token: np.ndarray) -> None:
    """Raises ValueError unless keys ascend, each has a finite value, and tokens are 0 or more."""
    if key.ndim != 1 or value.shape != key.shape or value.dtype.kind != "f":
        raise ValueError(f"{what} of shape {key.shape} with {value.dtype}{list(value.shape)}")
    if len(token) and (token.min() < 0 or not (np.diff(key) > 0).all()):
        raise ValueError(f"{what} that do not ascend from 0")
    if not np.isfinite(value).all():
        raise ValueError(f"{what} with a value that is not finite")
