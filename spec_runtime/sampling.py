"""From a row of logits to a token: temperature, top-k, top-p and keyed Gumbel noise.

There is no generator state. The noise of a token depends only on (seed, absolute position, token
id), so the same seed gives the same tokens whatever was drafted, rejected or rolled back. This
file knows nothing of trees or of the target.
"""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass
from typing import TypedDict

import numpy as np


class SamplingOptions(TypedDict, total=False):
    """The keyword arguments of `SamplingParams`, for callers that pass them through."""

    max_new_tokens: int
    temperature: float
    top_k: int | None
    top_p: float | None
    seed: int | None
    stop: str | tuple[str, ...] | list[str]
    stop_token_ids: tuple[int, ...] | list[int]
    ignore_eos: bool


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens and when to stop.

    temperature 0 is greedy. top_k and top_p: None = off; equal logits at top-k's edge all stay.
    seed None = a fresh one each time. stop: strings that end the text, themselves left out;
    stop_token_ids end it too, and so does the tokenizer's EOS unless ignore_eos.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: str | tuple[str, ...] | list[str] = ()
    stop_token_ids: tuple[int, ...] | list[int] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        if self.max_new_tokens < 1:
            raise ValueError(f"got max_new_tokens {self.max_new_tokens}, expected 1 or more")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"got temperature {self.temperature}, expected 0 (greedy) or more")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"got top_k {self.top_k}, expected 1 or more, or None for off")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"got top_p {self.top_p}, expected above 0 and up to 1")
        if any(not isinstance(s, str) or not s for s in stop):
            raise ValueError(f"got stop {stop!r}, expected strings that are not empty")


_M64 = (1 << 64) - 1
_SLACK = 1e-3  # far above the rounding of the float32 bound in `Sampler.__call__`


def _mix64(x: int) -> int:
    """The finaliser of splitmix64."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _M64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _M64
    return x ^ (x >> 31)


def _mix32(x: np.ndarray) -> np.ndarray:
    """The finaliser of murmur3, in place on u32."""
    x ^= x >> np.uint32(16)
    x *= np.uint32(0x85EBCA6B)
    x ^= x >> np.uint32(13)
    x *= np.uint32(0xC2B2AE35)
    x ^= x >> np.uint32(16)
    return x


class Sampler:
    """Draws tokens: `sampler(logits_V, position)`, position being that of the token drawn."""

    def __init__(self, params: SamplingParams, vocab_size: int) -> None:
        self.params = params
        if params.temperature > 0:
            seed = secrets.randbits(63) if params.seed is None else params.seed
            self._seed_key = _mix64((seed + 0x9E3779B97F4A7C15) & _M64)
            self._id_hash_V = _mix32(
                np.arange(1, vocab_size + 1, dtype=np.uint32) * np.uint32(0x9E3779B1)
            )

    def __call__(self, logits_V: np.ndarray, position: int) -> int:
        token = int(logits_V.argmax())  # of a NaN, if there is one
        if not math.isfinite(logits_V[token]):
            raise FloatingPointError(f"the target's logits are not finite at position {position}")
        return token if self.params.temperature == 0 else self._draw(logits_V, position)

    def survivors(self, logits_V: np.ndarray) -> tuple[np.ndarray | None, np.ndarray]:
        """Ids that temperature, top-k and top-p leave (None = all), and their logits / T.

        The latter are log-probabilities up to a constant.
        """
        params = self.params
        scaled = logits_V * np.float32(1 / params.temperature)
        ids: np.ndarray | None = None
        if params.top_k is not None and params.top_k < len(scaled):
            edge = np.partition(scaled, -params.top_k)[-params.top_k]
            ids = np.flatnonzero(scaled >= edge)
            scaled = scaled[ids]
        if params.top_p is not None and params.top_p < 1:
            p = np.exp(scaled - scaled.max())
            p /= p.sum()
            # everything below this bound weighs less than 1 - top_p together: never in the nucleus
            near = np.flatnonzero(p >= (1 - params.top_p) / len(p))
            order = near[np.argsort(-p[near], kind="stable")]
            num_kept = int(np.searchsorted(np.cumsum(p[order]), params.top_p)) + 1
            kept = np.sort(order[:num_kept])
            ids = kept if ids is None else ids[kept]
            scaled = scaled[kept]
        return ids, scaled

    def hash_bits(self, position: int, ids: np.ndarray | None = None) -> np.ndarray:
        """u32 noise bits of these token ids (None = all) at this position."""
        key = _mix64(self._seed_key ^ ((position * 0xD1342543DE82EF95) & _M64))
        x = self._id_hash_V if ids is None else self._id_hash_V[ids]
        x = x ^ np.uint32(key & 0xFFFFFFFF)
        x += np.uint32(key >> 32)
        return _mix32(x)

    def _draw(self, logits_V: np.ndarray, position: int) -> int:
        """argmax of log p - log E, E = -log(1 - v) exponential, v uniform from the hash.

        Since E >= v, log p - log v bounds every score from above. The bound takes one fast
        float32 pass over V; exact float64 scores are needed for the few ids that can still win.
        """
        ids, scaled = self.survivors(logits_V)
        bits = self.hash_bits(position, ids)
        bound = scaled - np.log((bits.astype(np.float32) + np.float32(0.5)) * np.float32(2**-32))

        def score(index: np.ndarray) -> np.ndarray:
            v = (bits[index] + 0.5) * 2.0**-32
            return scaled[index].astype(np.float64) - np.log(-np.log1p(-v))

        best = score(bound.argmax(keepdims=True))[0]
        rivals = np.flatnonzero(bound >= best - _SLACK)
        winner = int(rivals[score(rivals).argmax()])
        return winner if ids is None else int(ids[winner])
