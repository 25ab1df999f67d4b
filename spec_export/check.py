"""Check a bundle: its graphs against the transformers model, in the ways they are used.

Scripts of steps (prefill, chains, trees, long context) are played through the runtime's own cache
and backend; the reference never sees a tree, a mask or a slot: it runs each root-to-node path as a
plain sequence. Then perplexity, the tokenizer, and accepted length where there are drafters.
Knows what is compared and how close it must be; knows nothing of how graphs are made.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from spec_export import make_bundle, reference, target
from spec_runtime import bundle as bundles
from spec_runtime.backends import Backend, open_graph
from spec_runtime.kv import Cache, open_cache
from spec_runtime.stats import Stats
from spec_runtime.target import Target, Wants
from spec_runtime.text import Tokenizer, encode_prompt
from spec_runtime.trees.tree import TokenTree, is_chain

NUM_TREES, TREE_NODES = 6, 12
TREE_CONTEXT = 40  # tokens in front of the first random tree
LONGEST = 1500  # tokens of text in the long-context script
REFERENCE_TOKENS = 128  # per prompt, where accepted length is measured

console = Console(stderr=True)


@dataclass(frozen=True)
class Bounds:
    """How far a graph of some precision may be from the float32 model.

    logits: a row's largest |difference| over the range of that row. features: likewise over the
    row's largest |value|, each tap by itself. Both of the worst row at fp32, of the mean row in
    reduced precisions, whose worst row is the text's first: its outliers spoil any quantisation.
    perplexity: ratio on the shipped text.
    """

    logits: float
    features: float
    perplexity: float


# fp32: the same operators in another order of summation, measured 4e-6. The others: rounding; the
# demo's mean rows measure 0.07 (int8) and 0.04 (int4), 0.10 or more with positions one off and 0.5
# in trees that ignore their mask. How good a precision is, its perplexity says.
BOUNDS = {
    "fp32": Bounds(logits=1e-4, features=1e-3, perplexity=1.001),
    "fp16": Bounds(logits=0.01, features=0.02, perplexity=1.005),
    "bf16": Bounds(logits=0.05, features=0.1, perplexity=1.02),
    "int8": Bounds(logits=0.1, features=0.15, perplexity=1.03),
    "int4": Bounds(logits=0.1, features=0.15, perplexity=1.10),
}


@dataclass(frozen=True)
class CheckRow:
    """One line of the table. A row without a value was skipped (`note` says why), one without a
    bound is for information."""

    name: str
    precision: str
    value: float | None
    bound: float | None = None
    note: str = ""

    @property
    def skipped(self) -> bool:
        return self.value is None

    @property
    def passed(self) -> bool:
        if self.value is None:
            return True
        # NaN compares false, so it fails
        return self.value <= (np.inf if self.bound is None else self.bound)


def run(model: str | None, bundle: Path | None, precisions: Sequence[str]) -> list[CheckRow]:
    """Check `bundle`, or a fresh export of `model` in each precision, and print a table.

    model: folder, hub id, GGUF file, None = the demo; it must be the one the bundle was built from.
    precisions: for fresh exports only; fp32 is checked in both forms of the graph. A bundle with
    drafters gets their accepted length on the reference prompts written into its manifest.
    ValueError: a damaged bundle, or one of another model.
    """
    opened = None if bundle is None else bundles.read(bundle)
    source = target.resolve(model)
    if opened is not None:
        _require_origin(opened, source)
    with console.status("loading the reference model"):
        hf_model, hf_tokenizer = target.load(source)
    rows: list[CheckRow] = []
    if opened is not None:
        rows = _check_bundle(opened, _Reference(hf_model), hf_tokenizer)
        _store_accepted_lengths(opened, rows)
    else:
        with tempfile.TemporaryDirectory(prefix="specsplit-check-") as folder:
            for precision in dict.fromkeys(precisions):
                for form in ("slots", "contiguous") if precision == "fp32" else ("slots",):
                    out = Path(folder) / f"{precision}-{form}"
                    make_bundle.build(model, precision=precision, out=out, form=form)
                    fresh = bundles.read(out, verify=False)
                    rows += _check_bundle(fresh, _Reference(hf_model), hf_tokenizer)
    Console(highlight=False).print(_table(source.name, rows))
    return rows


def _require_origin(opened: bundles.Bundle, source: target.Source) -> None:
    origin = opened.manifest.provenance.get("model", opened.manifest.name)
    if origin != source.name:
        raise ValueError(
            f"got a bundle of {origin} to compare with {source.name}: name the model it was built "
            "from with --model"
        )


# ------------------------------------------------------------------------------------------ scripts


@dataclass(frozen=True)
class Script:
    """Steps to play from an empty cache: a tree, and the path of it that is then committed."""

    name: str
    steps: tuple[tuple[TokenTree, list[int]], ...]
    is_permuted: bool = False  # slots handed out at random

    def sequences(self) -> Iterator[list[tuple[int, ...]]]:
        """Per step, all tokens each of its nodes attends, in order, the node's own last."""
        committed: tuple[int, ...] = ()
        for tree, path in self.steps:
            yield [
                committed + tuple(tree.token_N[tree.path(node)].tolist())
                for node in range(tree.num_nodes)
            ]
            committed += tuple(tree.token_N[path].tolist())


def _chains(tokens: Sequence[int], size: int) -> list[tuple[TokenTree, list[int]]]:
    parts = [tokens[begin : begin + size] for begin in range(0, len(tokens), size)]
    return [(TokenTree.chain(part), list(range(len(part)))) for part in parts]


def _trees(tokens: Sequence[int], rng: np.random.Generator) -> list[tuple[TokenTree, list[int]]]:
    """Random shapes over random tokens of the text; of each a random path is committed."""
    steps = []
    for _ in range(NUM_TREES):
        parents = [0, *(int(rng.integers(0, node)) for node in range(1, TREE_NODES))]
        drawn = rng.choice(np.asarray(tokens, np.int64), TREE_NODES)
        tree = TokenTree(drawn, np.array(parents, np.int64))
        steps.append((tree, tree.path(int(rng.integers(0, TREE_NODES)))))
    return steps


def _scripts(text: Sequence[int], max_length: int, chains_only: bool) -> list[Script]:
    """The last script commits the text itself, as far as it fits: perplexity is read off it."""
    rng = np.random.default_rng(0)
    text = text[: min(LONGEST, max_length)]
    head = text[:TREE_CONTEXT]
    trees = (*_chains(head, 64), *_trees(text, rng))
    # a tree at the far end: the text goes on along its trunk, a branch of other tokens beside it
    trunk, branch = text[-8:], rng.choice(np.asarray(text, np.int64), 4).tolist()
    fork = TokenTree(
        np.array([*trunk, *branch]), np.array([0, *range(len(trunk) - 1), 0, 8, 9, 10])
    )
    end = TokenTree.chain(trunk) if chains_only else fork
    scripts = [
        Script("chunks of 1", tuple(_chains(text[:16], 1))),
        Script("chunks of 7", tuple(_chains(text[:60], 7))),
        Script("chunks of 64", tuple(_chains(text[:160], 64))),
        Script("chain decode", (*_chains(head, 64), *_chains(text[TREE_CONTEXT:][:24], 1))),
        Script("random trees", trees),
        Script("permuted slots", trees, is_permuted=True),
        Script(
            f"context of {len(text)}",
            (*_chains(text[:-8], 64), (end, list(range(len(trunk))))),
        ),
    ]
    if not chains_only:
        return scripts
    return [each for each in scripts if all(is_chain(tree.parent_N) for tree, _ in each.steps)]


# ---------------------------------------------------------------------------------------- reference


class _Reference:
    """The transformers model, one plain sequence at a time."""

    def __init__(self, hf_model: Any, taps: Sequence[int] = ()) -> None:
        self.model = hf_model
        self.taps = tuple(taps)

    def expect(self, script: Script) -> list[np.ndarray]:
        """Per step f32[N, F] like Verified.features: final hidden states, then the taps."""
        steps = list(script.sequences())
        ordered = sorted({sequence for step in steps for sequence in step})
        rows: dict[tuple[int, ...], np.ndarray] = {}
        # in this order a sequence that is the beginning of others comes right before one of them
        for sequence, after in zip(ordered, [*ordered[1:], ()], strict=True):
            if after[: len(sequence)] != sequence:
                hidden_TF = self._hidden(sequence)
                rows |= {sequence[: t + 1]: row for t, row in enumerate(hidden_TF)}
        return [np.stack([rows[sequence] for sequence in step]) for step in steps]

    def _hidden(self, tokens: Sequence[int]) -> np.ndarray:
        ids_BT = torch.tensor([tokens])
        with torch.inference_mode():
            out = self.model.model(ids_BT, output_hidden_states=True, use_cache=False)
        parts = [out.last_hidden_state, *(out.hidden_states[tap] for tap in self.taps)]
        return torch.cat(parts, dim=-1)[0].numpy()

    def logits(self, features_NF: np.ndarray) -> np.ndarray:
        with torch.inference_mode():
            width = self.model.lm_head.in_features
            rows = torch.from_numpy(np.ascontiguousarray(features_NF[:, :width]))
            return self.model.lm_head(rows).numpy()


# -------------------------------------------------------------------------------------------- play


class _PermutedBackend:
    """Slot s of a slots-form graph becomes slot perm[s]: order in the cache must not matter."""

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
class _Differences:
    """What playing a script showed, by row: errors, divergence from the reference in nats, and
    nats of the committed tokens for both models."""

    logits: list[float] = field(default_factory=list)
    features: list[float] = field(default_factory=list)
    divergence: list[float] = field(default_factory=list)
    num_other_argmax: int = 0
    nats: list[float] = field(default_factory=list)
    reference_nats: list[float] = field(default_factory=list)


def _play(
    script: Script, backend: Backend, cache: Cache, info: bundles.TargetInfo, truth: _Reference
) -> _Differences:
    graph = Target(
        _PermutedBackend(backend, np.random.default_rng(1)) if script.is_permuted else backend,
        cache,
        vocab_size=info.dims.vocab_size,
        max_length=info.max_length,
    )
    committed = [token for tree, path in script.steps for token in tree.token_N[path].tolist()]
    found, width = _Differences(), info.dims.hidden_size
    for (tree, path), expected_NF in zip(script.steps, truth.expect(script), strict=True):
        verified = graph.verify(tree, Wants(features=True, taps=info.taps))
        got_NV = np.stack([verified.row(node) for node in range(tree.num_nodes)])
        wanted_NV = truth.logits(expected_NF)
        error_N = np.abs(got_NV - wanted_NV).max(axis=1) / np.ptp(wanted_NV, axis=1)
        found.logits += error_N.tolist()
        got_NF, error_N = verified.features(range(tree.num_nodes)), np.zeros(tree.num_nodes)
        for begin in range(0, expected_NF.shape[1], width):
            expected_ND, got_ND = (rows[:, begin : begin + width] for rows in (expected_NF, got_NF))
            part_N = np.abs(got_ND - expected_ND).max(axis=1) / np.abs(expected_ND).max(axis=1)
            error_N = np.maximum(error_N, part_N)  # NaN wins
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
    wide_NV = logits_NV.astype(np.float64)
    wide_NV -= wide_NV.max(axis=1, keepdims=True)
    return wide_NV - np.log(np.exp(wide_NV).sum(axis=1, keepdims=True))


# --------------------------------------------------------------------------------------------- rows


def _check_bundle(opened: bundles.Bundle, truth: _Reference, hf_tokenizer: Any) -> list[CheckRow]:
    info, graph = opened.manifest.target, opened.manifest.graphs["target"]
    name = info.precision if graph.form == "slots" else f"{info.precision} {graph.form}"
    tokenizer = Tokenizer(opened)
    rows = [_tokenizer_row(name, tokenizer, hf_tokenizer)]
    if info.rope.get("factors") == "long":
        why = "transformers takes the short rotary factors for short sequences, the graph the long"
        return [*rows, CheckRow("logits", name, None, note=why)]
    try:
        backend = open_graph(opened, graph, info.max_length + info.scratch)
    except ValueError as error:
        return [*rows, CheckRow("logits", name, None, note=str(error))]
    text = tokenizer.encode(reference.prose(), special_tokens=True)
    truth = _Reference(truth.model, info.taps)
    rows += _graph_rows(name, opened, backend, truth, text)
    del backend  # its weights and buffers, before the engine has its own
    return [*rows, *_accepted_length_rows(name, opened)]


def _graph_rows(
    name: str,
    opened: bundles.Bundle,
    backend: Backend,
    truth: _Reference,
    text: Sequence[int],
) -> list[CheckRow]:
    info = opened.manifest.target
    bounds = BOUNDS[info.precision]
    summed_up = np.max if info.precision == "fp32" else np.mean
    rows, results = [], []
    attention = opened.manifest.graphs["target"].attention
    for script in _scripts(text, info.max_length, chains_only=attention == "chain"):
        if script.is_permuted and backend.form != "slots":
            continue
        with console.status(f"{name}: {script.name}"):
            cache = open_cache(backend.form, backend.capacity, attention)
            result = _play(script, backend, cache, info, truth)
        results.append(result)
        rows.append(CheckRow(script.name, name, float(summed_up(result.logits)), bounds.logits))
    which = f"features, taps {', '.join(map(str, info.taps))}" if info.taps else "features"
    errors = [error for result in results for error in result.features]
    rows.append(CheckRow(which, name, float(summed_up(errors)), bounds.features))
    other = sum(result.num_other_argmax for result in results)
    share = other / len(errors)
    rows.append(CheckRow("other argmax", name, share, note=f"{other} of {len(errors)} rows"))
    nats = float(np.mean([each for result in results for each in result.divergence]))
    rows.append(CheckRow("divergence", name, nats, note="nats a row, mean"))
    ours, theirs = (
        float(np.exp(np.mean(nats))) for nats in (results[-1].nats, results[-1].reference_nats)
    )
    note = f"{ours:.3f} to {theirs:.3f}, {len(results[-1].nats)} tokens"
    rows.append(CheckRow("perplexity ratio", name, ours / theirs, bounds.perplexity, note))
    return rows


def _tokenizer_row(name: str, tokenizer: Tokenizer, hf_tokenizer: Any) -> CheckRow:
    """Prompts whose ids are not those of transformers' tokenizer and template."""
    prompts = reference.prompts()
    wrong = sum(
        encode_prompt(tokenizer, prompt, raw=False, system=None)
        != reference.encode(hf_tokenizer, prompt)
        for prompt in prompts
    )
    note = f"of {len(prompts)} prompts"
    return CheckRow("encoded otherwise", name, float(wrong), 0.0, note)


def _accepted_length_rows(name: str, opened: bundles.Bundle) -> list[CheckRow]:
    from spec_runtime.load import load

    expected = {each.name: each.expected_accepted_length for each in opened.manifest.drafters}
    if not expected:
        return []
    plain, rows = load(opened.path, "none", verify=False, profile=False), []
    encoded = [encode_prompt(plain.tokenizer, each, False, None) for each in reference.prompts()]
    short = [ids for ids in encoded if len(ids) < opened.manifest.target.max_length]
    for drafter, before in expected.items():
        engine = plain.with_drafter(drafter)
        with console.status(f"{name}: accepted length of {drafter}"):
            stats = Stats.total(
                engine.generate(ids, max_new_tokens=REFERENCE_TOKENS, reuse=False).stats
                for ids in short
            )
        note = f"{stats.committed_tokens} tokens, {len(short)} of {len(encoded)} prompts"
        if before is not None:
            note += f"; the manifest had {before:.2f}"
        value = stats.accepted_length if stats.steps else None
        rows.append(CheckRow(f"accepted, {drafter}", name, value, note=note))
    return rows


def _store_accepted_lengths(opened: bundles.Bundle, rows: Sequence[CheckRow]) -> None:
    """Into the manifest, by an atomic rename; a bundle that failed keeps the manifest it had."""
    if not opened.manifest.drafters or not all(row.passed for row in rows):
        return
    measured = {row.name.removeprefix("accepted, "): row.value for row in rows}
    drafters = tuple(
        dataclasses.replace(drafter, expected_accepted_length=measured[drafter.name])
        for drafter in opened.manifest.drafters
        if drafter.name in measured
    )
    if len(drafters) == len(opened.manifest.drafters):
        manifest = dataclasses.replace(opened.manifest, drafters=drafters)
        bundles.write_manifest(opened.path, manifest)


def _table(model: str, rows: Sequence[CheckRow]) -> Table:
    table = Table(
        title=f"{model}: exported graphs against transformers in float32",
        caption="chunks to context: difference of logits over a row's range, of the worst row at "
        "fp32, of the mean row elsewhere",
    )
    for head in ("check", "precision", "value", "bound", "", "note"):
        table.add_column(head, justify="right" if head in ("value", "bound") else "left")
    for row, after in zip(rows, [*rows[1:], None], strict=True):
        verdict = "[red]FAILED[/]"
        if row.skipped:
            verdict = "[yellow]skipped[/]"
        elif row.passed:
            verdict = "" if row.bound is None else "[green]ok[/]"
        table.add_row(
            row.name,
            row.precision,
            "" if row.value is None else f"{row.value:.4g}",
            "" if row.bound is None else f"{row.bound:g}",
            verdict,
            row.note,
            end_section=after is None or after.precision != row.precision,
        )
    return table
