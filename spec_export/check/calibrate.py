"""Measures how well a bundle's drafters guess, and stores the result in its manifest.

Each prompt is answered twice by plain decoding, while the drafter drafts at every position without
being used. In the first pass it grows its largest tree. The first N nodes of that tree are its tree
of N nodes, so one pass gives the accepted length for every N. It also shows how far the path
probabilities can be trusted:

    reliability(bin) = (mean path probability, share of those nodes on the answer's path, count).

Then the answer is known, and it shows its candidates along it (AlongTruth):

    a_k^(r) = the share of positions where the answer's token k + 1 steps ahead is the r-th guess,
              among the positions where the tokens before it were guessed (Medusa's tree search).

This file needs no torch.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from spec_export import reference
from spec_export.report import SILENT, Report
from spec_runtime import load
from spec_runtime.bundle import manifest as bundles
from spec_runtime.engine import Engine
from spec_runtime.errors import UserError
from spec_runtime.files.writing import require_writable
from spec_runtime.loop.proposer import Drafting, Proposer
from spec_runtime.measure.prompts import read_prompts
from spec_runtime.proposers.wrapper import ProposerWrapper
from spec_runtime.trees.budget import AlongTruth, Budget
from spec_runtime.trees.tree import TokenTree

SIZES = (2, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # nodes of the trees whose accepted length is stored
# Reliability is measured by octaves of path probability; the last octave has all lower ones too.
NUM_OCTAVES = 12


class _TreeRecorder(ProposerWrapper):
    """Keeps the tree that a drafter makes at each position, and proposes only the root.

    budget_at: gives the drafter's budget from the position and the budget of decoding there.
    """

    def __init__(self, drafter: Proposer, budget_at: Callable[[int, Budget], Budget]) -> None:
        super().__init__(drafter)
        self.trees: list[TokenTree] = []
        self._budget_at = budget_at

    def drafting(self, token: int, budget: Budget) -> Drafting:
        budget = self._budget_at(len(self.trees), budget)
        self.trees.append((yield from super().drafting(token, budget)))
        return TokenTree.root(token)


@dataclasses.dataclass(frozen=True)
class Answer:
    """Holds what was seen of one answer of T + 1 tokens, at its T positions that have a successor.

    nodes: for each position, the nodes of the tree grown there that the answer went through,
    without the root. Example: [[1, 4], []] if the first tree had the next two tokens and the second
    tree had none.
    ranks: for each position, the ranks that the answer's next tokens had among the candidates. A
    list ends with the drafter's last level, with the answer, or with None for the first miss.
    predicted f64[M], observed bool[M]: for all nodes of these trees, the path probability and
    whether the answer went through.
    num_candidates: the most candidates of a root.
    """

    nodes: list[list[int]]
    ranks: list[list[int | None]]
    predicted: np.ndarray
    observed: np.ndarray
    num_candidates: int


def run(
    bundle: Path,
    prompts: Path | None = None,
    drafter: str | None = None,
    max_new_tokens: int = 128,
    threads: int | None = None,
    report: Report = SILENT,
    on_found: Callable[[str, dict[str, Any]], None] = lambda drafter, calibration: None,
) -> dict[str, dict[str, Any]]:
    """Calibrates `drafter`, or every trained drafter of `bundle`, and stores it in the manifest.

    prompts: a file as `spec-runtime bench` reads it; None means the sixteen shipped prompts.
    A prompt that exceeds the context is left out, and `report` says so.
    on_found: is called with each drafter and its calibration, before anything is stored.
    Returns the calibrations by drafter, see bundle.manifest.DrafterInfo. Raises UserError for a
    damaged bundle, an unknown drafter, or if no prompt can be used, and UserError or OSError,
    before anything is measured, if the manifest cannot be written.
    """
    opened = bundles.read(bundle)
    manifest = opened.manifest
    infos = manifest.drafters if drafter is None else (manifest.drafter(drafter),)
    if not infos:
        raise UserError(
            f"{bundle} has no trained drafter to calibrate; build it with one (--drafter)"
        )
    require_writable(opened.path / bundles.MANIFEST)
    contents: list[Any] = list(reference.prompts())
    if prompts is not None:
        contents = [prompt.content for prompt in read_prompts(prompts)]
    plain = load(bundle, "none", threads=threads, verify=False, profile=False)
    encoded = []
    for number, content in enumerate(contents, 1):
        try:
            encoded.append(plain.encode(content))
        except UserError as error:
            report.line(f"prompt {number} skipped: {error}")
    found = {}
    for info in infos:
        engine = plain.with_drafter(info.name, lookup=False)
        seen = []
        with report.progress(info.name) as advance:
            for prompt_ids in encoded:
                seen.append(watch(engine, prompt_ids, max_new_tokens))
                advance(len(seen), len(encoded))
        found[info.name] = summarise(seen)
        on_found(info.name, found[info.name])
    _store(bundle, found)
    return found


def _store(bundle: Path, found: dict[str, dict[str, Any]]) -> None:
    """Writes calibrations by drafter into the manifest as it is now: `check` may have written."""
    manifest = bundles.read(bundle, verify=False).manifest
    drafters = tuple(
        dataclasses.replace(info, calibration=found.get(info.name, info.calibration))
        for info in manifest.drafters
    )
    bundles.write_manifest(bundle, dataclasses.replace(manifest, drafters=drafters))


def recorded(
    engine: Engine,
    prompt: list[int],
    max_new_tokens: int,
    budget_at: Callable[[int, Budget], Budget],
) -> tuple[list[int], list[TokenTree]]:
    """Answers the prompt by plain decoding; returns the tokens, and the drafter's tree at each
    position, for which `budget_at` gives its budget as _TreeRecorder has it."""
    recorders: list[_TreeRecorder] = []

    def wrap(proposer: Proposer) -> Proposer:
        recorders.append(_TreeRecorder(proposer, budget_at))
        return recorders[0]

    watched = engine.observed(wrap)
    result = watched.generate(prompt, max_new_tokens=max_new_tokens, reuse=False)
    return result.token_ids, recorders[0].trees


def largest(position: int, given: Budget) -> Budget:
    """Returns the budget of the largest tree that is looked at, at any position."""
    return Budget(SIZES[-1], max_depth=given.max_depth)


def watch(engine: Engine, prompt: list[int], max_new_tokens: int) -> Answer:
    """Makes both passes over one prompt and returns what the drafter showed."""
    tokens, grown = recorded(engine, prompt, max_new_tokens, largest)

    def along_answer(position: int, given: Budget) -> Budget:
        return Budget(2, growth=AlongTruth(tuple(tokens[position + 1 :])))

    again, along = recorded(engine, prompt, max_new_tokens, along_answer)
    # Rounding may let a GPU give another answer the second time; only the common part counts.
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(tokens, again, strict=False))
    return _answer(tokens, grown[: len(list(same)) - 1], along)


def _answer(tokens: list[int], grown: list[TokenTree], along: list[TokenTree]) -> Answer:
    """Returns what these trees show, both from the first position on."""
    truths = [tokens[position + 1 :] for position in range(len(grown))]
    nodes, predicted, observed = [], [np.zeros(0)], [np.zeros(0, np.bool_)]
    for tree, truth in zip(grown, truths, strict=False):
        nodes.append(tree.follow(truth))
        if tree.num_nodes == 1:
            continue
        assert tree.log_prob_N is not None, "a tree without probabilities"
        is_on_path_N = np.isin(np.arange(tree.num_nodes), nodes[-1])
        is_judged_N = (tree.depth_N > 0) & (tree.depth_N <= len(truth))
        predicted.append(np.exp(np.minimum(tree.log_prob_N[is_judged_N], 0.0)))
        observed.append(is_on_path_N[is_judged_N])
    pairs = list(zip(along, truths, strict=False))
    return Answer(
        nodes,
        [_ranks_along(tree, truth) for tree, truth in pairs],
        np.concatenate(predicted),
        np.concatenate(observed),
        max((len(tree.children(0)) for tree, _ in pairs), default=0),
    )


def _ranks_along(tree: TokenTree, truth: Sequence[int]) -> list[int | None]:
    """Returns the rank of each token of `truth` among its candidates, as Answer.ranks has them."""
    node, ranks = 0, list[int | None]()
    for token in truth:
        children, child = tree.children(node), tree.child(node, token)
        if not children:
            break  # the drafter's last level
        ranks.append(None if child is None else children.index(child))
        if child is None:
            break
        node = child
    return ranks


def summarise(seen: Sequence[Answer]) -> dict[str, Any]:
    """Returns the calibration as bundle.manifest.DrafterInfo has it. Raises UserError without
    answers."""
    answers = [answer for answer in seen if answer.nodes]
    if not answers:
        raise UserError(
            "got no answer of two tokens or more, expected prompts that fit the context and have "
            "longer answers"
        )
    ranks = [ranks for answer in answers for ranks in answer.ranks]
    num_candidates = max(answer.num_candidates for answer in answers)
    return {
        "prompts": len(answers),
        "positions": len(ranks),
        "accuracy": _accuracy(ranks, num_candidates),
        "reliability": reliability(
            np.concatenate([answer.predicted for answer in answers]),
            np.concatenate([answer.observed for answer in answers]),
        ),
        "accepted_length": {
            str(n): round(accepted_length([answer.nodes for answer in answers], n), 4)
            for n in SIZES
        },
    }


def _accuracy(ranks: Sequence[Sequence[int | None]], num_candidates: int) -> list[list[float]]:
    """Returns a_k^(r) of the module's docstring as rows k of columns r.

    Example: ranks [[0, 1], [None]] and two candidates give [[0.5, 0.0], [0.0, 1.0]].
    """
    table = []
    for k in range(max(map(len, ranks))):
        here = [each[k] for each in ranks if len(each) > k]
        table.append([round(here.count(rank) / len(here), 5) for rank in range(num_candidates)])
    return table


def accepted_length(nodes: Sequence[Sequence[Sequence[int]]], num_nodes: int) -> float:
    """Returns the accepted length of decoding these answers with trees of `num_nodes` nodes.

    That is the number of committed tokens per step if each tree has only its first `num_nodes`
    nodes, root included. `nodes`: by answer and position, as in Answer.
    """
    num_steps = 0
    for answer in nodes:
        position = 0
        while position < len(answer):
            num_steps += 1
            position += 1 + sum(node < num_nodes for node in answer[position])
    return sum(map(len, nodes)) / num_steps


def reliability(predicted: np.ndarray, observed: np.ndarray) -> list[list[float]]:
    """Returns rows (mean prediction, observed share, count) by octaves of `predicted` f64[M].

    The rows rise in both figures: where a likelier octave was accepted less often than the one
    below it, the two become one row.
    """
    with np.errstate(divide="ignore"):
        octave_M = np.minimum(-np.log2(predicted), NUM_OCTAVES - 1).astype(np.int64)
    rows: list[list[float]] = []  # sums, which become means at the end
    for octave in range(NUM_OCTAVES - 1, -1, -1):
        here = octave_M == octave
        if here.any():
            rows.append(
                [float(predicted[here].sum()), float(observed[here].sum()), int(here.sum())]
            )
        while len(rows) > 1 and rows[-1][1] / rows[-1][2] < rows[-2][1] / rows[-2][2]:
            last = rows.pop()
            rows[-1] = [a + b for a, b in zip(rows[-1], last, strict=True)]
    return [[float(f"{p / n:.4g}"), float(f"{o / n:.4g}"), n] for p, o, n in rows]
