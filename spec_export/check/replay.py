"""Replays the steps of decoding through a bundle's graph and compares them with transformers.

Scripts of steps (prefill, chains, trees, long context) are played through the runtime's own cache
and backend. The transformers model sees no tree, mask or slot: it runs each path from the root to a
node as a plain sequence.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from spec_export.model.hidden_states import features_and_taps
from spec_export.model.modules.fusion import Fusion
from spec_runtime.backends import Backend
from spec_runtime.bundle import manifest as bundles
from spec_runtime.loop.kv import Cache
from spec_runtime.loop.target import Target, Wants
from spec_runtime.trees.tree import TokenTree

NUM_TREES, TREE_NODES = 6, 12
TREE_CONTEXT = 40  # tokens in front of the first random tree
LONGEST = 1500  # tokens of text in the script with the longest context

# ---- scripts ----


@dataclass(frozen=True)
class Script:
    """Holds the steps to play from an empty cache: trees, each with the path committed after it."""

    name: str
    steps: tuple[tuple[TokenTree, list[int]], ...]
    is_permuted: bool = False  # True: KV rows go to slots in a random order

    def sequences(self) -> Iterator[list[tuple[int, ...]]]:
        """Gives for each step the tokens that each node attends, in order, its own token last.

        Example: after 5 and 6 are committed, root 7 with child 8 gives [(5, 6, 7), (5, 6, 7, 8)].
        """
        committed: tuple[int, ...] = ()
        for tree, path in self.steps:
            yield [
                committed + tuple(tree.token_N[tree.path(node)].tolist())
                for node in range(tree.num_nodes)
            ]
            committed += tuple(tree.token_N[path].tolist())


def _chains(tokens: Sequence[int], size: int) -> list[tuple[TokenTree, list[int]]]:
    """Returns steps of up to `size` tokens each that commit all of `tokens`."""
    parts = [tokens[begin : begin + size] for begin in range(0, len(tokens), size)]
    return [(TokenTree.chain(part), list(range(len(part)))) for part in parts]


def _trees(tokens: Sequence[int], rng: np.random.Generator) -> list[tuple[TokenTree, list[int]]]:
    """Returns trees of random shapes over random tokens of the text, each with a random path."""
    steps = []
    for _ in range(NUM_TREES):
        parents = [0, *(int(rng.integers(0, node)) for node in range(1, TREE_NODES))]
        drawn = rng.choice(np.asarray(tokens, np.int64), TREE_NODES)
        tree = TokenTree(drawn, np.array(parents, np.int64))
        steps.append((tree, tree.path(int(rng.integers(0, TREE_NODES)))))
    return steps


def make_scripts(text: Sequence[int], max_length: int) -> list[Script]:
    """Returns the scripts to play on a text of token ids.

    The last script commits the text itself, as far as it fits, so that it gives a perplexity.
    """
    rng = np.random.default_rng(0)
    text = text[: min(LONGEST, max_length)]
    head = text[:TREE_CONTEXT]
    trees = (*_chains(head, 64), *_trees(text, rng))
    # The last tree: the text continues along its trunk, and a branch of other tokens leaves it.
    trunk, branch = text[-8:], rng.choice(np.asarray(text, np.int64), 4).tolist()
    fork = TokenTree(
        np.array([*trunk, *branch]), np.array([0, *range(len(trunk) - 1), 0, 8, 9, 10])
    )
    return [
        Script("chunks of 1", tuple(_chains(text[:16], 1))),
        Script("chunks of 7", tuple(_chains(text[:60], 7))),
        Script("chunks of 64", tuple(_chains(text[:160], 64))),
        Script("chain decode", (*_chains(head, 64), *_chains(text[TREE_CONTEXT:][:24], 1))),
        Script("random trees", trees),
        Script("permuted slots", trees, is_permuted=True),
        Script(
            f"context of {len(text)}", (*_chains(text[:-8], 64), (fork, list(range(len(trunk)))))
        ),
    ]


# ---- the transformers model ----


class TransformersModel:
    """Runs the transformers model on one plain sequence at a time, and keeps what it found: scripts
    have beginnings and whole trees in common.

    taps: ids of layers whose inputs count as features too. fusions: what drafters make of such
    states counts as well, by the graph's names of it.
    """

    def __init__(
        self, hf_model: Any, taps: Sequence[int] = (), fusions: Mapping[str, Fusion] | None = None
    ) -> None:
        self.model = hf_model
        self.taps, self.fusions = tuple(taps), dict(fusions or {})
        self._rows: dict[tuple[int, ...], np.ndarray] = {}  # f32[F] after each sequence
        self._of_token: Any = None  # what the layers return of one token

    def expect(self, script: Script) -> list[np.ndarray]:
        """Returns each step's f32[N, F] like Verified.features: final hidden states, taps, then
        fusions."""
        steps = list(script.sequences())
        ordered = sorted({sequence for step in steps for sequence in step})
        # Sorted, a sequence that begins others comes right before one of them.
        for sequence, after in zip(ordered, [*ordered[1:], ()], strict=True):
            if sequence not in self._rows and after[: len(sequence)] != sequence:
                hidden_TF = self._hidden(sequence)
                self._rows |= {sequence[: t + 1]: row for t, row in enumerate(hidden_TF)}
        return [np.stack([self._rows[sequence] for sequence in step]) for step in steps]

    def _hidden(self, tokens: Sequence[int]) -> np.ndarray:
        """Returns f32[T, F], the features at every token."""
        ids_BT = torch.tensor([tokens])
        read = sorted({*self.taps, *(i for each in self.fusions.values() for i in each.taps)})
        with torch.inference_mode():
            final, *states = features_and_taps(self.model.model, ids_BT, read)
            by_id = dict(zip(read, states, strict=True))
            parts = [final, *(by_id[i] for i in self.taps)]
            parts += [each([by_id[i] for i in each.taps]) for each in self.fusions.values()]
        return torch.cat(parts, dim=-1)[0].numpy()

    def logits(self, features_NF: np.ndarray) -> np.ndarray:
        """Returns f32[N, V], the logits of these features; taps are not read.

        They replace the last hidden state of one token, which the layers run on once, because what
        the model does with them (scales, softcaps) differs by family.
        """
        width = self.model.config.hidden_size
        rows = torch.from_numpy(np.ascontiguousarray(features_NF[:, :width]))
        token, layers = torch.zeros((1, 1), dtype=torch.int64), self.model.model
        with torch.inference_mode():
            if self._of_token is None:
                self._of_token = layers(token, use_cache=False)
            self._of_token.last_hidden_state = rows[None]
            layers.forward = lambda *_, **__: self._of_token
            try:
                return self.model(token, use_cache=False).logits[0].numpy()
            finally:
                del layers.forward


# ---- comparing ----


class _PermutedBackend:
    """Moves slot s of a slots-form graph to slot perm[s], since their order must not matter."""

    def __init__(self, inner: Backend, rng: np.random.Generator) -> None:
        self.form, self.capacity = inner.form, inner.capacity
        self._inner = inner
        self._perm_S = rng.permutation(inner.capacity)

    def run(self, feeds: dict[str, np.ndarray], outputs: Sequence[str]) -> dict[str, np.ndarray]:
        mask = np.empty_like(feeds["mask"])
        mask[..., self._perm_S] = feeds["mask"]
        top = np.flatnonzero(mask.any(axis=(0, 1, 2)))[-1]
        moved = {
            "mask": mask,
            "slots": self._perm_S[feeds["slots"]],
            "seqlens_k": np.array([top], np.int32),
        }
        return self._inner.run(feeds | moved, outputs)


@dataclass
class Differences:
    """Holds how the graph differed from the model in one script.

    By row: logits, features and those of each fusion are relative errors, see check.Bounds;
    divergence is KL(model ‖ graph) in nats. num_other_argmax: rows with another argmax. By
    committed token: nats of the graph and reference_nats of the model, minus the log-probability
    each.
    """

    logits: list[float] = field(default_factory=list)
    features: list[float] = field(default_factory=list)
    fused: dict[str, list[float]] = field(default_factory=dict)
    divergence: list[float] = field(default_factory=list)
    num_other_argmax: int = 0
    nats: list[float] = field(default_factory=list)
    reference_nats: list[float] = field(default_factory=list)


def play(
    script: Script,
    backend: Backend,
    cache: Cache,
    info: bundles.TargetInfo,
    truth: TransformersModel,
) -> Differences:
    """Plays a script through the graph, from an empty cache, and compares all rows with `truth`."""
    graph = Target(
        _PermutedBackend(backend, np.random.default_rng(1)) if script.is_permuted else backend,
        cache,
        vocab_size=info.dims.vocab_size,
        max_length=info.max_length,
    )
    committed = [token for tree, path in script.steps for token in tree.token_N[path].tolist()]
    widths = dict.fromkeys(bundles.feature_names(info.taps), info.dims.hidden_size)
    widths |= {name: each.fc.shape[1] for name, each in truth.fusions.items()}
    found = Differences(fused={name: [] for name in truth.fusions})
    for (tree, path), expected_NF in zip(script.steps, truth.expect(script), strict=True):
        verified = graph.verify(tree, Wants(tuple(widths)))
        got_NV = np.stack([verified.row(node) for node in range(tree.num_nodes)])
        wanted_NV = truth.logits(expected_NF)
        error_N = np.abs(got_NV - wanted_NV).max(axis=1) / np.ptp(wanted_NV, axis=1)
        found.logits += error_N.tolist()
        got_NF, error_N = verified.features(range(tree.num_nodes)), np.zeros(tree.num_nodes)
        ends = np.cumsum(list(widths.values()))[:-1]
        wanted, got = (np.split(rows, ends, axis=1) for rows in (expected_NF, got_NF))
        for name, expected_ND, got_ND in zip(widths, wanted, got, strict=True):
            part_N = np.abs(got_ND - expected_ND).max(axis=1) / np.abs(expected_ND).max(axis=1)
            if name in found.fused:
                found.fused[name] += part_N.tolist()
            else:
                error_N = np.maximum(error_N, part_N)  # a NaN stays
        found.features += error_N.tolist()
        found.num_other_argmax += int((got_NV.argmax(1) != wanted_NV.argmax(1)).sum())
        after = committed[graph.length + 1 : graph.length + 1 + len(path)]
        rows = path[: len(after)]
        got_NV, wanted_NV = _log_softmax(got_NV), _log_softmax(wanted_NV)
        found.divergence += (np.exp(wanted_NV) * (wanted_NV - got_NV)).sum(axis=1).tolist()
        found.nats += (-got_NV[rows, after]).tolist()
        found.reference_nats += (-wanted_NV[rows, after]).tolist()
        graph.commit(path)
    return found


def _log_softmax(logits_NV: np.ndarray) -> np.ndarray:
    """Returns log-probabilities f64[N, V]."""
    wide_NV = logits_NV.astype(np.float64)
    wide_NV -= wide_NV.max(axis=1, keepdims=True)
    return wide_NV - np.log(np.exp(wide_NV).sum(axis=1, keepdims=True))
