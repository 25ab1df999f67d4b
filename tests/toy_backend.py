"""Computes a toy target and drafter in numpy, with analytic logits and no weights, for tests.

The target's logits depend on exactly the (position, token) pairs that a row attends, so that any
slip in slots, mask or positions changes the output. The drafter refuses rows that are not what the
protocol says. Both check the feeds' names, types and shapes.
"""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from spec_runtime.dialogue.chat_template import ChatTemplate
from spec_runtime.grammar.base import Matcher
from spec_runtime.grammar.formats import Grammar
from spec_runtime.grammar.llguidance_matcher import GrammarCompiler
from spec_runtime.grammar.trials import TrialLimits
from spec_runtime.interruption import Interruption

_COMMON = ("input_ids", "position_ids", "mask", "logit_rows")
_FORM_FEEDS: dict[str, dict[str, type]] = {
    "slots": {"slots": np.int64, "seqlens_k": np.int32},
    "contiguous": {"write_index": np.int64, "src": np.int64, "perm": np.int64},
}
FEATURE_WIDTH = 4
CHATML = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def _mix(x: np.ndarray) -> np.ndarray:
    """Returns the bits of u64 mixed by splitmix64's finaliser."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _check_feeds(feeds: dict[str, np.ndarray], form: str, capacity: int, extra: set[str]) -> int:
    """Asserts that the feeds are what a graph takes; returns N."""
    wanted: dict[str, type] = {**dict.fromkeys(_COMMON, np.int64), **_FORM_FEEDS[form]}
    wanted |= {"mask": np.bool_, **dict.fromkeys(extra, np.float32)}
    assert set(feeds) == set(wanted), (sorted(feeds), sorted(wanted))
    for name, dtype in wanted.items():
        assert feeds[name].dtype == dtype, (name, feeds[name].dtype)
    n = feeds["input_ids"].shape[1]
    assert feeds["input_ids"].shape == feeds["position_ids"].shape == (1, n), n
    assert feeds["mask"].shape == (1, 1, n, capacity), feeds["mask"].shape
    assert (feeds["logit_rows"] < n).all(), feeds["logit_rows"]
    assert feeds["logit_rows"].ndim == 1, feeds["logit_rows"].shape
    if form == "slots":
        assert feeds["slots"].shape == (n,) == np.unique(feeds["slots"]).shape, feeds["slots"]
        assert feeds["seqlens_k"].shape == (1,), feeds["seqlens_k"].shape
        assert 0 <= feeds["seqlens_k"][0] < capacity, feeds["seqlens_k"]
    else:
        assert feeds["write_index"].shape == (1,), feeds["write_index"].shape
        assert len(feeds["src"]) >= 1, "an empty src"
        assert sorted(feeds["perm"]) == list(range(len(feeds["src"]) + n)), feeds["perm"]
    return n


class _Rows:
    """The toy's KV buffer: one i64 record a slot, -1 where nothing was written."""

    def __init__(self, form: str, capacity: int, width: int) -> None:
        self.form = form
        self.row_SW = np.full((capacity, width), -1, np.int64)

    def write(self, feeds: dict[str, np.ndarray], new_NW: np.ndarray) -> np.ndarray:
        """Writes N rows as the graph would; returns the slots that each may attend, bool[N, S]."""
        mask_NS = feeds["mask"][0, 0].copy()
        if self.form == "slots":
            self.row_SW[feeds["slots"]] = new_NW
            mask_NS[:, int(feeds["seqlens_k"][0]) + 1 :] = False  # as GroupQueryAttention does
        else:
            update = np.concatenate([self.row_SW[feeds["src"]], new_NW])[feeds["perm"]]
            begin = int(feeds["write_index"][0])
            assert begin + len(update) <= len(self.row_SW), (begin, len(update))
            self.row_SW[begin : begin + len(update)] = update
        return mask_NS


class ToyTarget:
    """A target whose next token mostly follows a random order-2 table.

    Logits are `peak` at table[token before, token], plus noise in [0, 2 * noise) from a hash of
    everything attended. Features f32[N, 4] are token, position, a hash, and the tap's id (-1 for
    the final one).
    """

    def __init__(
        self,
        *,
        vocab_size: int = 64,
        capacity: int = 256,
        form: str = "slots",
        seed: int = 0,
        peak: float = 6.0,
        noise: float = 4.0,
        num_successors: int | None = None,
    ) -> None:
        self.form = form
        self.capacity = capacity
        self.vocab_size = vocab_size
        self.num_runs = 0
        self._rows = _Rows(form, capacity, 2)
        self._peak, self._noise = peak, noise
        # Few successors make short loops, which prompt lookup guesses.
        high = vocab_size if num_successors is None else num_successors
        rng = np.random.default_rng(seed)
        self.table_VV = rng.integers(0, high, (vocab_size, vocab_size))
        self._seed = _mix(np.array([seed + 1], np.uint64))

    def run(self, feeds: dict[str, np.ndarray], outputs: Sequence[str]) -> dict[str, np.ndarray]:
        n = _check_feeds(feeds, self.form, self.capacity, set())
        self.num_runs += 1
        token_N, position_N = feeds["input_ids"][0], feeds["position_ids"][0]
        assert ((token_N >= 0) & (token_N < self.vocab_size)).all(), token_N
        mask_NS = self._rows.write(feeds, np.stack([token_N, position_N], axis=1))
        token_S, position_S = self._rows.row_SW.T
        pair_S = _mix((position_S * 65537 + token_S).astype(np.uint64) + self._seed)
        # A sum does not depend on the order of slots: positions carry the order.
        hash_N = _mix(mask_NS.astype(np.uint64) @ pair_S)
        result: dict[str, np.ndarray] = {}
        for name in outputs:
            if name == "logits":
                row_M = feeds["logit_rows"]
                previous_M = [self._before(mask_NS[row], position_N[row]) for row in row_M]
                result[name] = self._logits(hash_N[row_M], previous_M, token_N[row_M])
            else:
                tap = -1 if name == "features" else int(name.removeprefix("taps."))
                hashed = (hash_N >> np.uint64(44)).astype(np.float32)
                columns = [token_N, position_N, hashed, np.full(n, tap)]
                result[name] = np.stack(columns, axis=1).astype(np.float32)
        return result

    def _before(self, attended_S: np.ndarray, position: int) -> int:
        """Returns the token one position back, 0 at the start."""
        token_S, position_S = self._rows.row_SW.T
        found = token_S[attended_S & (position_S == position - 1)]
        return int(found[0]) if len(found) else 0

    def _logits(
        self, hash_M: np.ndarray, previous_M: Sequence[int], token_M: np.ndarray
    ) -> np.ndarray:
        id_V = np.arange(1, self.vocab_size + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        bits_MV = _mix(hash_M[:, None] + id_V[None])
        logits_MV = (bits_MV >> np.uint64(40)).astype(np.float32) * np.float32(
            2 * self._noise / 2**24
        )
        logits_MV[np.arange(len(token_M)), self.table_VV[previous_M, token_M]] += self._peak
        return logits_MV


class ToyDrafter:
    """A one-pass drafter that follows the target's table: it is right whenever the noise loses.

    It asserts that its rows are those of the protocol: pairs at positions 0, 1, 2 … (feature of
    the position, token of the next), then mask rows, in order, with zero features.
    """

    def __init__(
        self,
        target: ToyTarget,
        *,
        num_masks: int = 3,
        capacity: int = 256,
        form: str = "slots",
        with_features: bool = True,
        num_taps: int = 0,
        num_candidates: int = 3,
    ) -> None:
        self.form = form
        self.capacity = capacity
        self.num_masks = num_masks
        self.mask_token_base = target.vocab_size
        self._table_VV = target.table_VV
        self._rows = _Rows(form, capacity, 3)
        self._feature_width = FEATURE_WIDTH * (1 + num_taps) if with_features else 0
        odds = 0.5 ** np.arange(1, num_candidates + 1)
        self._log_prob_C = np.log(odds / odds.sum()).astype(np.float32)

    def run(self, feeds: dict[str, np.ndarray], outputs: Sequence[str]) -> dict[str, np.ndarray]:
        extra = {"features"} if self._feature_width else set()
        n = _check_feeds(feeds, self.form, self.capacity, extra)
        token_N, position_N = feeds["input_ids"][0], feeds["position_ids"][0]
        before_N = np.full(n, -1)
        is_pair_N = token_N < self.mask_token_base
        if self._feature_width:
            feature_NF = feeds["features"][0]
            assert feature_NF.shape == (n, self._feature_width), feature_NF.shape
            before_N[is_pair_N] = feature_NF[is_pair_N, 0]
            assert (feature_NF[is_pair_N, 1] == position_N[is_pair_N]).all(), "misplaced feature"
            assert not feature_NF[~is_pair_N].any(), "a mask row with a feature"
        mask_NS = self._rows.write(feeds, np.stack([token_N, position_N, before_N], axis=1))
        guesses = [self._guess(mask_NS[row]) for row in feeds["logit_rows"]]
        result = {
            "guess_ids": np.array(guesses, np.int64),
            "guess_log_probs": np.tile(self._log_prob_C, (len(guesses), 1)),
        }
        return {name: result[name] for name in outputs}

    def _guess(self, attended_S: np.ndarray) -> list[int]:
        rows = self._rows.row_SW[attended_S]
        rows = rows[rows[:, 1].argsort()]
        assert (rows[:, 1] == np.arange(len(rows))).all(), f"positions {rows[:, 1]}"
        num_pairs = int((rows[:, 0] < self.mask_token_base).sum())
        num_masks = len(rows) - num_pairs
        assert num_pairs >= 1, "mask rows alone"
        assert num_masks <= self.num_masks, num_masks
        masks = rows[num_pairs:, 0]
        assert (masks == self.mask_token_base + np.arange(num_masks)).all(), masks
        if self._feature_width:
            # The token of row t is the one whose feature row t + 1 holds.
            assert (rows[: num_pairs - 1, 0] == rows[1:num_pairs, 2]).all(), "feature and token"
            before = int(rows[num_pairs - 1, 2])
        else:
            before = int(rows[num_pairs - 2, 0]) if num_pairs > 1 else 0
        token = int(rows[num_pairs - 1, 0])
        for _ in range(num_masks + 1):
            before, token = token, int(self._table_VV[before, token])
        return [(token + c) % self.mask_token_base for c in range(len(self._log_prob_C))]


class ByteTokenizer:
    """A tokenizer of bytes (ids 0 to 255), BOS 256 and EOS 257: it splits inside characters."""

    vocab_size = 258
    bos: int | None = 256
    eos: tuple[int, ...] = (257,)

    def __init__(self, template: ChatTemplate | None = None) -> None:
        self.template = template

    def encode(self, text: str, special_tokens: bool, is_marked: bool = False) -> list[int]:
        return [256] * (special_tokens and bool(text)) + list(text.encode())

    def marked(self, value: Any, by_assistant: bool = False) -> Any:
        return value  # it has no name for its BOS and EOS

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")

    def spelled(self, ids: Sequence[int]) -> str:
        names = {256: b"<bos>", 257: b"<eos>"}
        return b"".join(names.get(i) or bytes([i]) for i in ids).decode(errors="replace")

    def open_compiler(self, num_logits: int) -> GrammarCompiler:
        return _compiler(num_logits)

    def matcher(
        self, grammar: Grammar, num_logits: int, interruption: Interruption | None = None
    ) -> Matcher:
        return _compiler(num_logits).matcher(grammar, interruption)

    def close(self) -> None:
        pass  # others share the compiler


@functools.cache
def _compiler(num_logits: int) -> GrammarCompiler:
    """Returns a compiler over bytes, with a limit of memory that does not keep tests waiting."""
    limits = TrialLimits(seconds=30, megabytes=64)
    from bpe_tokenizer import definition  # imported here because few tests need it

    return GrammarCompiler(definition((), {}), ByteTokenizer.eos, num_logits, limits)
