"""Turns a row of logits into p and into a token: processors, keyed Gumbel noise, log-probabilities.

Processors run in the order of transformers and vLLM: on raw logits the caller's own processor, the
mask of a grammar, the bias, the repetition penalty, frequency and presence penalties; then
temperature, top-k, top-p, min-p. What they leave is p, for plain and speculative decoding alike.
All but the bias look at the text so far, so they differ from node to node of a tree: they are told
the tokens between the text and the node.

Target sampling has no generator state: the noise of a token depends only on (seed, absolute
position, token id), so the same seed gives the same tokens whatever was drafted, rejected or
rolled back.
"""

import math
import secrets
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

import numpy as np

from spec_runtime.errors import UserError
from spec_runtime.grammar.path_masks import PathMasks
from spec_runtime.sampling.params import LogitsProcessor, SamplingParams


class TokenLogprob(NamedTuple):
    """One token of the answer: its id, its log-probability (natural), and (id, log-probability) of
    the likeliest tokens at its place, best first."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]


def token_logprob(logits_V: np.ndarray, token: int, num_top: int) -> TokenLogprob:
    """Returns the log-probabilities of `token` and of the `num_top` best tokens, of equal ones
    those with the lowest ids, from the target's own logits f32[V]."""
    log_prob_V = logits_V - logits_V.max().astype(np.float64)
    log_prob_V -= math.log(np.exp(log_prob_V).sum())
    place = min(max(1, num_top), len(log_prob_V))
    ids = np.flatnonzero(log_prob_V >= np.partition(log_prob_V, -place)[-place])
    best = ids[np.argsort(-log_prob_V[ids], kind="stable")][:num_top].tolist()
    top = [(i, float(log_prob_V[i])) for i in best]
    return TokenLogprob(token, float(log_prob_V[token]), top)


class TopLogits(NamedTuple):
    """The largest logits of a row f32[V]: their ids i64[K] and values f32[K], falling, and the
    log Σ exp of all V."""

    id_K: np.ndarray
    logit_K: np.ndarray
    logsumexp: float


_M64 = (1 << 64) - 1
# Far above the rounding of the float32 bound in `Sampler._draw`: scores that can win are between
# the best token's least noise, -3.2, and the largest bound, 22.9, whatever the temperature.
_SLACK = 1e-3
# far above the rounding of cumulated float32 probabilities: if top-p cuts this close to a token,
# all V logits decide
_NEAR_CUT = 1e-5
_FAR = 600.0  # nats, whose exp is still a finite float64


def _mix64(x: int) -> int:
    """Returns the finaliser of splitmix64."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _M64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _M64
    return x ^ (x >> 31)


def _mix32(x: np.ndarray) -> np.ndarray:
    """Applies the finaliser of murmur3 to u32 in place, and returns it."""
    x ^= x >> np.uint32(16)
    x *= np.uint32(0x85EBCA6B)
    x ^= x >> np.uint32(13)
    x *= np.uint32(0xC2B2AE35)
    x ^= x >> np.uint32(16)
    return x


def _gumbel(bits: np.ndarray) -> np.ndarray:
    """Returns f64 noise -log E of u32 bits: E = -log(1 - v) is exponential, v uniform."""
    v = (bits + 0.5) * 2.0**-32
    noise: np.ndarray = -np.log(-np.log1p(-v))
    return noise


class _Processors:
    """Applies the caller's processor, a grammar's masks, bias and penalties to raw logits; keeps
    what they need of the text so far."""

    def __init__(
        self,
        params: SamplingParams,
        vocab_size: int,
        prompt: Sequence[int],
        masks: PathMasks | None,
    ) -> None:
        self._params = params
        self._masks = masks
        self._tokens = [*prompt]
        self._biased = np.array(list(params.logit_bias), np.int64)
        self._bias = np.array(list(params.logit_bias.values()), np.float32)
        self._is_seen_V = np.zeros(vocab_size, np.bool_)  # in prompt or answer
        self._is_seen_V[np.asarray(prompt, np.int64)] = True
        self._count_V = np.zeros(vocab_size, np.float32)  # in the answer

    def commit(self, tokens: Sequence[int]) -> None:
        self._tokens += tokens
        self._is_seen_V[tokens] = True
        np.add.at(self._count_V, tokens, 1)
        if self._masks is not None:
            self._masks.commit(tokens)

    def __call__(self, logits_V: np.ndarray, path: Sequence[int] | np.ndarray) -> np.ndarray:
        params, path = self._params, np.asarray(path, np.int64)
        out_V = logits_V.astype(np.float32)
        if params.logits_processor is not None:
            out_V = self._own(params.logits_processor, out_V, path)
        if self._masks is not None:
            np.putmask(out_V, ~self._masks.after(path), -np.inf)
        out_V[self._biased] += self._bias
        if params.repetition_penalty != 1:
            is_seen_V = self._is_seen_V.copy()
            is_seen_V[path] = True
            seen, penalty = np.flatnonzero(is_seen_V), np.float32(params.repetition_penalty)
            logits = out_V[seen]
            out_V[seen] = np.where(logits > 0, logits / penalty, logits * penalty)
        if params.frequency_penalty or params.presence_penalty:
            count_V = self._count_V.copy()
            np.add.at(count_V, path, 1)
            out_V -= np.float32(params.frequency_penalty) * count_V
            out_V -= np.float32(params.presence_penalty) * (count_V > 0)
        return out_V

    def _own(
        self, processor: LogitsProcessor, logits_V: np.ndarray, path: np.ndarray
    ) -> np.ndarray:
        """Returns what the caller's processor makes of a row; raises UserError if that is none."""
        result_V = np.array(processor([*self._tokens, *path.tolist()], logits_V), np.float32)
        if result_V.shape != logits_V.shape or not math.isfinite(result_V.max()):
            largest = f", the largest {result_V.max()}" if result_V.size else ""
            raise UserError(
                f"got logits of shape {list(result_V.shape)}{largest} from logits_processor, "
                f"expected {list(logits_V.shape)} and at least one finite, none of them NaN"
            )
        return result_V


def _refuse(logits_V: np.ndarray, position: int) -> NoReturn:
    """Raises an error that says why no token is left of the target's logits f32[V]."""
    if math.isfinite(logits_V.max()):
        raise UserError(
            f"got no token at position {position} that logits_processor and response_format both "
            "allow, expected at least one"
        )
    raise FloatingPointError(f"the target's logits are not finite at position {position}")


class Sampler:
    """Draws tokens from p: `sampler(logits_V, position, path)` returns the token at `position`.

    `path` holds the tokens between the committed ones and that token; it is read only if
    `reads_path` is set. reads_top: the largest logits settle most draws, see
    `draw_from_top`. `masks` come from the request's grammar.
    """

    def __init__(
        self,
        params: SamplingParams,
        vocab_size: int,
        prompt: Sequence[int] = (),
        masks: PathMasks | None = None,
    ) -> None:
        self.params = params
        self.reads_path = params.has_penalties or params.reads_text
        self._process = None
        if params.has_processors:
            self._process = _Processors(params, vocab_size, prompt, masks)
        is_drawn = params.rule == "target_sampling" and params.logprobs is None
        self.reads_top = is_drawn and self._process is None  # see `draw_from_top`
        if params.temperature > 0:
            self._seed = secrets.randbits(63) if params.seed is None else params.seed
            self._seed_key = _mix64((self._seed + 0x9E3779B97F4A7C15) & _M64)
            self._id_hash_V = _mix32(
                np.arange(1, vocab_size + 1, dtype=np.uint32) * np.uint32(0x9E3779B1)
            )

    def commit(self, tokens: Sequence[int]) -> None:
        """Makes these tokens part of the answer."""
        if self._process is not None:
            self._process.commit(tokens)

    def __call__(
        self, logits_V: np.ndarray, position: int, path: Sequence[int] | np.ndarray = ()
    ) -> int:
        processed_V = logits_V if self._process is None else self._process(logits_V, path)
        token = int(processed_V.argmax())  # of a NaN, if there is one
        if not math.isfinite(processed_V[token]):
            _refuse(logits_V, position)
        return token if self.params.temperature == 0 else self._draw(processed_V, position)

    def draw_from_top(self, top: TopLogits, position: int) -> int | None:
        """Returns what the call would draw from the whole row if its largest logits settle that,
        else None.

        The temperature must be above 0, without bias and penalties. Top-k, top-p and min-p settle
        the draw if all tokens that they leave are among the largest. Without them it is settled if
        the best score among the largest exceeds what any other token could reach: the smallest of
        these logits plus the largest noise of all other tokens.
        """
        assert self.params.temperature > 0, self.params
        assert self._process is None, "processors need all logits"
        if not math.isfinite(top.logsumexp):
            return None  # the whole row says what is wrong
        found = self._top_survivors(top)
        if found is None:
            return None
        id_C, scaled_C, is_all = found
        bits_V = self.hash_bits(position)
        score_C = scaled_C.astype(np.float64) + _gumbel(bits_V[id_C])
        best = int(score_C.argmax())
        if not is_all:
            bits_V[id_C] = np.iinfo(np.uint32).max
            if score_C[best] <= scaled_C[-1].astype(np.float64) + _gumbel(bits_V.min()):
                return None
        return int(id_C[best])

    def _tempered(self, logits: np.ndarray, top: np.float32) -> np.ndarray:
        """Returns (logits - top) / T in float32, where `top` is the largest logit.

        Subtracting first keeps digits: two float32 logits of about the same size have an exact
        difference, while logits of 20 divided by a temperature of 1e-6 are 2 apart at best.
        """
        with np.errstate(over="ignore"):  # far below `top`: -inf, whose p is 0
            scaled: np.ndarray = logits - top
            # never by 0, which would make NaN of -inf
            scaled *= np.float32(max(1 / self.params.temperature, 1e-37))
        return scaled

    def _top_survivors(self, top: TopLogits) -> tuple[np.ndarray, np.ndarray, bool] | None:
        """Returns what `survivors` does, from the largest logits only: ids, scaled logits, and
        whether these are all that are left. Returns None if the largest logits cannot tell what is
        left."""
        params = self.params
        id_C = top.id_K
        scaled_C = self._tempered(top.logit_K, top.logit_K[0])
        is_all = len(id_C) == len(self._id_hash_V)
        if params.top_k is not None and params.top_k < len(self._id_hash_V):
            num_kept = int((scaled_C >= scaled_C[min(params.top_k, len(id_C)) - 1]).sum())
            if num_kept == len(id_C) and not is_all:  # others may be as large as the last
                return None
            id_C, scaled_C, is_all = id_C[:num_kept], scaled_C[:num_kept], True
        if params.top_p is not None and params.top_p < 1:
            cut = self._nucleus(top, scaled_C, is_all, params.top_p)
            if cut is None:
                return None
            id_C, scaled_C, is_all = id_C[:cut], scaled_C[:cut], True
        if params.min_p:
            num_kept = int((scaled_C >= math.log(params.min_p)).sum())
            if num_kept == len(id_C) and not is_all:
                return None
            id_C, scaled_C, is_all = id_C[:num_kept], scaled_C[:num_kept], True
        return id_C, scaled_C, is_all

    def _nucleus(
        self, top: TopLogits, scaled_C: np.ndarray, is_all: bool, top_p: float
    ) -> int | None:
        """Returns how many of these tokens top-p keeps, or None if that is not clear.

        The rest are n logits, none above the last of these, l, with the sum R = Σ exp(logit - l).
        Their weight at temperature T, Σ exp((logit - l) / T), lies between R and n (R / n)^(1 / T).
        For T < 1 R is the upper bound, because each term gets smaller, for T > 1 the lower one; the
        other bound is Jensen's inequality. R is at most n, whatever its rounding.
        """
        scaled = scaled_C.astype(np.float64)
        cumulated_C = np.cumsum(np.exp(scaled - scaled[0]))
        low = high = 0.0
        if not is_all:
            last, n = float(top.logit_K[-1]), len(self._id_hash_V) - len(scaled)
            if not top.logsumexp - last < _FAR:
                return None
            whole = math.exp(top.logsumexp - last)
            rest = whole - float(np.exp(top.logit_K.astype(np.float64) - last).sum())
            slack = _NEAR_CUT * whole  # for the rounding
            sums = max(0.0, min(n, rest - slack)), min(n, max(0.0, rest) + slack)
            ends = [(r, n * (r / n) ** (1 / self.params.temperature)) for r in sums]
            weight = math.exp(scaled[-1] - scaled[0])
            low, high = weight * min(ends[0]), weight * max(ends[1])
        low, high = cumulated_C[-1] + low, cumulated_C[-1] + high
        cut = int(np.searchsorted(cumulated_C / high, top_p + _NEAR_CUT)) + 1
        if cut != int(np.searchsorted(cumulated_C / low, top_p - _NEAR_CUT)) + 1:
            return None
        if cut > len(scaled) or (cut == len(scaled) and not is_all):
            return None
        if cut < len(scaled) and scaled[cut - 1] - scaled[cut] < _NEAR_CUT:
            return None  # near a tie
        return cut

    def probabilities(
        self, logits_V: np.ndarray, position: int, path: Sequence[int] | np.ndarray = ()
    ) -> np.ndarray:
        """Returns p f64[V] of the token at `position`, from which the call draws; the temperature
        must be above 0."""
        processed_V = logits_V if self._process is None else self._process(logits_V, path)
        if not math.isfinite(processed_V.max()):
            _refuse(logits_V, position)
        ids, scaled = self.survivors(processed_V)
        # float32, as the logits are: ten times as fast over V as float64's exp
        weight = np.exp(scaled).astype(np.float64)
        weight /= weight.sum()
        if ids is None:
            return weight
        p_V = np.zeros(len(logits_V))
        p_V[ids] = weight
        return p_V

    def stream(self) -> np.random.Generator:
        """Returns a random stream of this seed that has nothing to do with the keyed noise."""
        return np.random.default_rng(self._seed & _M64)

    def survivors(self, logits_V: np.ndarray) -> tuple[np.ndarray | None, np.ndarray]:
        """Returns the ids that top-k, top-p and min-p leave (None: all), and their logits / T.

        The latter are log-probabilities up to a constant; the largest is 0.
        """
        params = self.params
        scaled = self._tempered(logits_V, logits_V.max())
        ids: np.ndarray | None = None
        if params.top_k is not None and params.top_k < len(scaled):
            edge = np.partition(scaled, -params.top_k)[-params.top_k]
            ids = np.flatnonzero(scaled >= edge)
            scaled = scaled[ids]
        if params.top_p is not None and params.top_p < 1:
            p = np.exp(scaled)
            p /= p.sum()
            # all tokens below this bound together weigh less than 1 - top_p: never in the nucleus
            near = np.flatnonzero(p >= (1 - params.top_p) / len(p))
            order = near[np.argsort(-p[near], kind="stable")]
            num_kept = int(np.searchsorted(np.cumsum(p[order]), params.top_p)) + 1
            kept = np.sort(order[:num_kept])
            ids = kept if ids is None else ids[kept]
            scaled = scaled[kept]
        if params.min_p:
            kept = np.flatnonzero(scaled >= math.log(params.min_p))
            ids = kept if ids is None else ids[kept]
            scaled = scaled[kept]
        return ids, scaled

    def hash_bits(self, position: int, ids: np.ndarray | None = None) -> np.ndarray:
        """Returns the u32 noise bits of these token ids (None: all) at this position."""
        key = _mix64(self._seed_key ^ ((position * 0xD1342543DE82EF95) & _M64))
        x = self._id_hash_V if ids is None else self._id_hash_V[ids]
        x = x ^ np.uint32(key & 0xFFFFFFFF)
        x += np.uint32(key >> 32)
        return _mix32(x)

    def noise(self, position: int, ids: np.ndarray) -> np.ndarray:
        """Returns the Gumbel noise f64 of these token ids at this position, an array of their
        shape: the call draws the argmax of log p + noise. The temperature must be above 0."""
        return _gumbel(self.hash_bits(position, ids))

    def _draw(self, logits_V: np.ndarray, position: int) -> int:
        """Returns the argmax of log p - log E, where E = -log(1 - v) is exponential and v uniform
        from the hash.

        Since E >= v, log p - log v bounds every score from above. The bound takes one fast
        float32 pass over V; exact float64 scores are needed for the few ids that can still win.
        """
        ids, scaled = self.survivors(logits_V)
        bits = self.hash_bits(position, ids)
        bound = scaled - np.log((bits.astype(np.float32) + np.float32(0.5)) * np.float32(2**-32))

        def score(index: np.ndarray) -> np.ndarray:
            return scaled[index].astype(np.float64) + _gumbel(bits[index])

        best = score(bound.argmax(keepdims=True))[0]
        rivals = np.flatnonzero(bound >= best - _SLACK)
        winner = int(rivals[score(rivals).argmax()])
        return winner if ids is None else int(ids[winner])
