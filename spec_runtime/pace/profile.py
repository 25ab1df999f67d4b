"""Keeps the machine profile: what `spec-runtime tune` measured here, and the budget it chose.

A profile is a JSON file in the user's cache folder. It is found by its key: bundle,
processor, threads, precision and drafter. Any other machine has another key, so that a profile
which was copied to it is not found there.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from annotated_types import Ge, Le, Len

from spec_runtime.bundle import manifest as bundles
from spec_runtime.errors import UserError
from spec_runtime.files import mapping
from spec_runtime.files.kept import read_kept
from spec_runtime.files.machine import cache_folder, cpu_model, default_threads, versions
from spec_runtime.files.writing import locked, require_writable, sha256, write_atomically
from spec_runtime.trees.budget import Budget, Grown, RankPath, Static

PLAIN = "plain"  # the candidate that is plain decoding
FIRST_USE = "first use"  # where a profile comes from, see Profile
BUSY_SPREAD, MOST_TAKES = 1.25, 3  # see Profile.is_settled

log = logging.getLogger("spec_runtime")


@dataclass(frozen=True)
class Key:
    """Names what a profile holds for; `drafter` ends in "+prompt_lookup" where that is merged,
    `versions` are those of specsplit and ONNX Runtime."""

    manifest: str  # sha256 of the bundle's manifest, which has the hashes of all its files
    cpu: str
    threads: int
    precision: str
    drafter: str
    versions: str = mapping.added_later("")


# Bounds of what a file may say, so that nothing computed from it is zero or infinite: times of a
# microsecond to three hours, and rates in tokens a second.
Milliseconds = Annotated[float, Ge(1e-3), Le(1e7)]
MoreMilliseconds = Annotated[float, Ge(0), Le(1e7)]
Ratio = Annotated[float, Ge(1e-4), Le(1e6)]
Rate = Annotated[float, Ge(0), Le(1e9)]
NumNodes = Annotated[float, Ge(1), Le(bundles.LARGEST_SIZE)]
Spread = Annotated[float, Ge(1), Le(1e9)]

MOST_POINTS = 1000  # of a curve; each step reads all of them
PassTimes = Annotated[tuple[tuple[NumNodes, Milliseconds], ...], Len(1, MOST_POINTS)]


@dataclass(frozen=True)
class PassCosts:
    """Times in milliseconds after `context` committed rows; see Costs for the others."""

    context: bundles.Index
    verify: PassTimes
    plain: Milliseconds
    spread: Spread = mapping.added_later(1.0)


@dataclass(frozen=True)
class Costs:
    """Times in milliseconds.

    verify: pairs (nodes, ms of one pass), ascending. draft: drafting one level. level: drafting
    each further level. host: accepting, committing and the rest of a step. plain: a whole step of
    plain decoding. prefill: one prompt token. Passes were measured after `context` committed rows,
    and those of as many nodes after more rows, `far`, if the bundle has room for them. spread: how
    many times the least time of repeated passes their median was, 1 where none was repeated.
    """

    verify: PassTimes
    draft: MoreMilliseconds
    level: MoreMilliseconds
    host: MoreMilliseconds
    plain: Milliseconds
    prefill: MoreMilliseconds
    context: bundles.Index = mapping.added_later(0)
    far: PassCosts | None = mapping.added_later(None)
    spread: Spread = mapping.added_later(1.0)

    def __post_init__(self) -> None:
        nodes, far = [n for n, _ in self.verify], self.far
        if any(n >= more for n, more in itertools.pairwise(nodes)):
            raise UserError(f"got verify of {nodes!r:.80} nodes, expected ascending numbers")
        if far is None:
            return
        if [n for n, _ in far.verify] != nodes:
            raise UserError(
                f"got far.verify of {[n for n, _ in far.verify]!r:.80} nodes, expected those of "
                f"verify, {nodes!r:.80}"
            )
        if far.context <= self.context:
            raise UserError(
                f"got far.context {far.context}, expected more than context, {self.context}"
            )

    def at(self, context: int) -> Costs:
        """Returns the costs after so many committed rows: on the line through the two contexts
        that were measured. Before the first of them, at least half of what was measured there: a
        slow moment at the second one would let the line fall below zero."""
        far = self.far
        if far is None:
            return self
        share = (context - self.context) / (far.context - self.context)

        def on_line(near_ms: float, far_ms: float) -> float:
            return max(near_ms / 2, near_ms + share * max(0.0, far_ms - near_ms))

        verify = tuple(
            (n, on_line(near_ms, far_ms))
            for (n, near_ms), (_, far_ms) in zip(self.verify, far.verify, strict=True)
        )
        plain = on_line(self.plain, far.plain)
        return dataclasses.replace(self, verify=verify, plain=plain, far=None)

    def step_ms(self, max_nodes: int) -> tuple[float, ...]:
        """Returns the time of a step with one level of drafting and 1, 2, … max_nodes nodes,
        interpolated between the sizes measured."""
        verify_N = np.interp(np.arange(1, max_nodes + 1), *self._verify_2P)
        return tuple((verify_N + self.draft + self.host).round(4).tolist())

    def of(self, num_nodes: float, num_levels: float) -> float:
        """Returns the time of a step with trees of `num_nodes` nodes on average, root included, and
        `num_levels` levels of drafting."""
        drafting = self.draft + self.level * (num_levels - 1)
        return float(np.interp(num_nodes, *self._verify_2P)) + drafting + self.host

    @cached_property
    def _verify_2P(self) -> np.ndarray:
        return np.array(self.verify, np.float64).T


@dataclass(frozen=True)
class Gain:
    """Tokens committed a step, and how many times as fast as plain decoding they come."""

    accepted_length: Ratio
    speedup: Ratio


@dataclass(frozen=True)
class Candidate:
    """One way to decode; its `budget` is None for plain decoding.

    expected_speedup is predicted from the costs and the accuracies known; tokens_per_second,
    speedup and accepted_length are measured in the race; sampled_gain, that of texts drawn at
    temperature 1, is measured only for the winner. A value that was not determined is None.
    """

    name: str
    budget: Budget | None
    nodes: NumNodes | None = None  # of a tree, on average, root included
    expected_speedup: Ratio | None = None
    tokens_per_second: Rate | None = None
    speedup: Ratio | None = None
    accepted_length: Ratio | None = None
    sampled_gain: Gain | None = mapping.added_later(None)

    @property
    def gain(self) -> Gain:
        """The gain at temperature 0: measured, or else predicted, or else 1 and 1."""
        return Gain(self.accepted_length or 1.0, self.speedup or self.expected_speedup or 1.0)


@dataclass(frozen=True)
class Profile:
    """The costs and candidates that were found; `chosen` names one of the candidates.

    curve: where it comes from: predictions of `tune` from the "calibration" of the bundle or a
    "run", or the FIRST_USE of the bundle, without prompts. takes: how often that was measured.
    """

    key: Key
    costs: Costs
    curve: str
    candidates: tuple[Candidate, ...]
    chosen: str
    takes: Annotated[int, Ge(1), Le(bundles.LARGEST_SIZE)] = mapping.added_later(1)

    def __post_init__(self) -> None:
        if self.chosen not in (names := [candidate.name for candidate in self.candidates]):
            raise UserError(f"got chosen {self.chosen!r:.80}, expected one of {', '.join(names)}")

    @property
    def choice(self) -> Candidate:
        """The candidate that was chosen."""
        return next(c for c in self.candidates if c.name == self.chosen)

    @property
    def is_tuned(self) -> bool:
        """True if `tune` found it."""
        return self.curve != FIRST_USE

    @property
    def is_settled(self) -> bool:
        """False for costs that a first use measured on a busy machine, as the spread of repeated
        passes shows: they are measured again at a later load, up to MOST_TAKES times in all."""
        return self.is_tuned or self.costs.spread <= BUSY_SPREAD or self.takes >= MOST_TAKES

    @property
    def plain_wins(self) -> bool:
        """True if plain decoding was chosen."""
        return self.choice.budget is None


def key_of(opened: bundles.Bundle, drafter: str, threads: int | None) -> Key:
    """Returns the key of a drafter of this bundle on this machine; `threads` None is the default
    number of threads."""
    manifest = sha256(opened.path / bundles.MANIFEST)
    precision = opened.manifest.target.precision
    found = versions(("specsplit", "onnxruntime", "onnxruntime-gpu"))
    names = ", ".join(f"{name} {number}" for name, number in found.items())
    return Key(manifest, cpu_model(), threads or default_threads(), precision, drafter, names)


def path_of(key: Key) -> Path:
    """Returns the file that holds the profile of `key`, whether it exists or not. Raises UserError
    if there is no cache folder."""
    text = json.dumps(dataclasses.asdict(key), sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:20]
    return cache_folder() / "profiles" / f"{key.drafter}-{digest}.json"


@dataclass(frozen=True)
class _StoredBudget:
    """A budget as the file has it: with `paths` it is a static tree, without them a grown one, to
    which the other fields belong."""

    max_nodes: bundles.Size
    min_probability: float
    max_depth: int | None
    paths: tuple[RankPath, ...] | None
    step_ms: tuple[Milliseconds, ...] = ()
    level_ms: MoreMilliseconds = 0.0
    reliability: Annotated[tuple[tuple[float, float], ...], Len(0, MOST_POINTS)] = ()
    sampled_trust: Annotated[float, Ge(0.01), Le(100)] = mapping.added_later(1.0)
    # Profiles of older versions list these two, which no growth has any more.
    truth: Any = mapping.added_later(None)
    draw: Any = mapping.added_later(None)

    @classmethod
    def of(cls, budget: Budget) -> _StoredBudget:
        growth = budget.growth
        if isinstance(growth, Static):
            return cls(budget.max_nodes, 0.0, budget.max_depth, growth.paths)
        assert isinstance(growth, Grown), growth
        return cls(
            budget.max_nodes,
            growth.min_probability,
            budget.max_depth,
            None,
            growth.step_ms,
            growth.level_ms,
            growth.reliability,
            growth.sampled_trust,
        )

    def budget(self) -> Budget:
        grown = Grown(
            self.min_probability, self.step_ms, self.level_ms, self.reliability, self.sampled_trust
        )
        growth = grown if self.paths is None else Static(self.paths)
        return Budget(self.max_nodes, self.max_depth, growth)


@dataclass(frozen=True)
class _StoredCandidate(Candidate):
    """A candidate as the file has it."""

    budget: _StoredBudget | None  # type: ignore[assignment]
    sampled_pace: Gain | None = mapping.added_later(None)  # an older name of sampled_gain

    def candidate(self) -> Candidate:
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(Candidate)}
        values["budget"] = None if self.budget is None else self.budget.budget()
        values["sampled_gain"] = self.sampled_gain or self.sampled_pace
        return Candidate(**values)


@dataclass(frozen=True)
class _StoredProfile(Profile):
    """A profile as the file has it."""

    candidates: tuple[_StoredCandidate, ...]


def to_json(profile: Profile) -> dict[str, Any]:
    """Returns the profile as plain dicts and lists, as the file has it."""
    data: dict[str, Any] = mapping.to_json(profile)
    for row, candidate in zip(data["candidates"], profile.candidates, strict=True):
        if candidate.budget is not None:
            row["budget"] = mapping.to_json(_StoredBudget.of(candidate.budget))
    return data


def from_json(data: Any) -> Profile:
    """Returns the profile that `to_json` wrote as `data`; raises UserError if it is damaged."""
    stored = mapping.from_mapping(_StoredProfile, data, "profile")
    candidates = tuple(each.candidate() for each in stored.candidates)
    values = {field.name: getattr(stored, field.name) for field in dataclasses.fields(Profile)}
    return Profile(**values | {"candidates": candidates})


@contextmanager
def reserved(key: Key) -> Iterator[Path]:
    """Keeps other processes from tuning for `key` during the block; gives the profile's file.

    Two that measure at once would disturb each other, not only overwrite each other's result. So
    the lock is to be held for the whole measurement. Raises UserError before the block if another
    process holds it or there is no cache folder, and OSError if the file could not be written.
    """
    path = path_of(key)
    require_writable(path)
    with locked(path):
        yield path


def write(profile: Profile) -> Path:
    """Writes the profile where `find` looks for it, by way of a rename; returns the path."""
    path = path_of(profile.key)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(to_json(profile), indent=2) + "\n")
    return path


def find(key: Key, *, is_noted: bool = True) -> Profile | None:
    """Returns the profile of `key`, or None if there is none or no cache folder. Warns of a damaged
    profile, where that `is_noted`, and returns None."""
    try:
        path = path_of(key)
    except ValueError:
        return None
    try:
        profile = from_json(read_kept(path))
        if profile.key != key:
            raise UserError("it is of another machine or bundle")
    except FileNotFoundError:
        return None
    except (ValueError, OSError) as error:
        if is_noted:
            log.warning(
                "%s is ignored: %s; costs are measured anew, or run spec-runtime tune again",
                path,
                mapping.brief(error, 1000),
            )
        return None
    return profile
