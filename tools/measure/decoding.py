"""Decodes prompts for tables, subset by subset, so that a run that was stopped goes on.

Everything that is kept is a count or a sum of seconds, so that subsets add up. Accepted lengths do
not depend on the machine or its load; the speeds do, and each is beside plain decoding's in the
same run.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spec_runtime import Engine
from spec_runtime.errors import UserError
from spec_runtime.files.writing import write_atomically
from spec_runtime.loop.stats import Stats, ratio
from spec_runtime.measure import bench
from spec_runtime.measure.prompts import BenchPrompt
from spec_runtime.sampling import SamplingOptions
from spec_runtime.trees.budget import Budget

Counts = Counter[str]  # what `counted` gives


class Ledger:
    """Keeps counts by contender and subset of prompts in a JSON file.

    `settings` say what is decoded. Raises UserError if the file is there with other settings.
    """

    def __init__(self, file: Path, settings: Mapping[str, Any]) -> None:
        self.file = file
        self._decoded: dict[str, dict[str, dict[str, float]]] = {}
        self._notes: dict[str, Any] = {}
        self._settings = json.loads(json.dumps(settings))
        if file.is_file():
            found = json.loads(file.read_text())
            if found["settings"] != self._settings:
                raise UserError(
                    f"{file} holds figures of other settings (prompts, tokens or drafter): remove "
                    "it to decode again"
                )
            self._decoded = found["decoded"]
            self._notes = found.get("notes", {})

    def has(self, name: str, subset: str) -> bool:
        return subset in self._decoded.get(name, {})

    def lacks(self, names: Iterable[str], task: Task) -> bool:
        """Says whether a contender has not decoded a subset of the task yet."""
        return not all(self.has(name, subset) for name in names for subset in task.subsets)

    def add(self, found: Mapping[str, Counts], subset: str, note: Any = None) -> None:
        """Adds each contender's counts over one subset of the prompts, and writes the file.

        A `note`, if there is one, is whatever else JSON can hold about the subset (see `notes`).
        """
        for name, counts in found.items():
            self._decoded.setdefault(name, {})[subset] = dict(counts)
        if note:
            self._notes[subset] = note
        self.file.parent.mkdir(parents=True, exist_ok=True)
        content = {"settings": self._settings, "decoded": self._decoded}
        if self._notes:
            content["notes"] = self._notes
        write_atomically(self.file, json.dumps(content, indent=1) + "\n")

    def counts(self, name: str) -> dict[str, Counts]:
        """Returns a contender's counts by subset."""
        return {key: Counter(counts) for key, counts in self._decoded.get(name, {}).items()}

    @property
    def notes(self) -> dict[str, Any]:
        """Returns the notes by subset, of those that have one."""
        return dict(self._notes)

    def figures(self, name: str) -> dict[str, Any]:
        """Returns a contender's figures over all prompts decoded, and by subset."""
        subsets = self.counts(name)
        categories = {key: figures(counts) for key, counts in subsets.items()}
        return {**figures(sum(subsets.values(), Counter())), "categories": categories}


@dataclass(frozen=True)
class Task:
    """What each contender decodes: prompts, tokens an answer, and how tokens are drawn."""

    prompts: Sequence[BenchPrompt]
    max_new_tokens: int
    sampling: SamplingOptions

    @property
    def subsets(self) -> dict[str, list[BenchPrompt]]:
        """Returns the prompts by category, in the order met."""
        found: dict[str, list[BenchPrompt]] = {}
        for prompt in self.prompts:
            found.setdefault(prompt.category, []).append(prompt)
        return found

    @property
    def settings(self) -> dict[str, Any]:
        """Returns what tells one task from another, as JSON."""
        ids = [prompt.id for prompt in self.prompts]
        return {"prompts": ids, "max_new_tokens": self.max_new_tokens, **self.sampling}


def decode(engines: Mapping[str, Engine], task: Task, ledger: Ledger) -> None:
    """Decodes every subset that the ledger lacks for one of the contenders, and plainly beside it.

    All engines share one target. Whose turn comes first rotates.
    """
    for subset, prompts in task.subsets.items():
        left = {name: each for name, each in engines.items() if not ledger.has(name, subset)}
        if left:
            reports = bench.run(
                list(left.values()), prompts, task.max_new_tokens, sampling=task.sampling
            )
            found = {name: counted(report) for name, report in zip(left, reports, strict=True)}
            ledger.add(found, subset)


def sizes(engine: Engine, nodes: Iterable[int]) -> dict[int, Engine]:
    """Returns the engine with grown trees of each size, root included, whatever their probability;
    with the bundle's own for size 0.

    Raises UserError for more nodes than the bundle's scratch.
    """
    most = engine.target.max_nodes
    if too_many := [count for count in nodes if count > most]:
        raise UserError(f"got {too_many[0]} nodes, expected at most the bundle's {most}")
    return {n: engine.with_budget(Budget(n)) if n else engine for n in nodes}


def counted(report: bench.BenchReport) -> Counts:
    """Returns counts and seconds of a report; plain decoding's begin with ``plain_``."""
    turns = [turn for pair in report.pairs for turn in pair.turns]
    same = sum(pair.divergence is None for pair in report.pairs)
    found: Counts = Counter(prompts=len(report.pairs), turns=len(turns), identical=same)
    ways = {"": [turn.speculative for turn in turns], "plain_": [turn.plain for turn in turns]}
    for prefix, results in ways.items():
        stats = Stats.total(result.stats for result in results)
        found[f"{prefix}tokens"] = stats.committed_tokens
        found[f"{prefix}steps"] = stats.steps
        found[f"{prefix}drafted"] = stats.drafted_tokens
        seconds: dict[str, Any] = {"decode": stats.decode_seconds, **stats.timings}
        for phase in ("prefill", "decode", "draft", "verify"):
            found[f"{prefix}{phase}_seconds"] = seconds[phase]
    return found


def figures(counts: Counts) -> dict[str, Any]:
    """Returns the ratios of counts; accepted length is tokens per verify step, bonus included."""
    speed, plain = (
        ratio(counts[f"{prefix}tokens"], counts[f"{prefix}decode_seconds"])
        for prefix in ("", "plain_")
    )
    steps = counts["steps"]
    return {
        "prompts": counts["prompts"],
        "turns": counts["turns"],
        "tokens": counts["tokens"],
        "accepted_length": ratio(counts["tokens"], steps),
        "nodes": 1 + ratio(counts["drafted"], steps),
        "draft_ms": 1000 * ratio(counts["draft_seconds"], steps),
        "verify_ms": 1000 * ratio(counts["verify_seconds"], steps),
        "plain_verify_ms": 1000 * ratio(counts["plain_verify_seconds"], counts["plain_steps"]),
        "tokens_per_second": speed,
        "plain_tokens_per_second": plain,
        "speedup": ratio(speed, plain),
        "identical": ratio(counts["identical"], counts["prompts"]),
    }
