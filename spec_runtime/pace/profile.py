"""Keeps the machine profile: what `spec-runtime tune` measured here, and the budget it chose.

A profile is a JSON file in the user's cache folder. It is found by its key: bundle,
processor, threads, precision and drafter. Any other machine has another key, so that a profile
which was copied to it is not found there.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from annotated_types import Ge, Le, Len

from spec_runtime.bundle import manifest as bundles
from spec_runtime.errors import UserError
from spec_runtime.files import mapping
from spec_runtime.files.kept import read_kept
from spec_runtime.files.machine import cache_folder, cpu_model, default_threads, versions
from spec_runtime.files.writing import locked, require_writable, sha256, write_atomically
from spec_runtime.kernels.library import instructions
from spec_runtime.pace.costs import MOST_POINTS, Costs, Gain, NumNodes, Rate, Ratio
from spec_runtime.pace.pacer import LARGEST_TRUST, Known
from spec_runtime.trees.budget import Budget, Grown, RankPath, Static

PLAIN = "plain"  # the candidate that is plain decoding
FIRST_USE = "first use"  # where a profile comes from, see Profile
BUSY_SPREAD, MOST_TAKES = 1.25, 3  # see Profile.is_settled

Trusted = Annotated[float, Ge(1 / LARGEST_TRUST), Le(LARGEST_TRUST)]

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
    versions: str = ""


@dataclass(frozen=True)
class Trees:
    """Says which trees to draft: Static ones of these `paths`, or else Grown ones."""

    max_nodes: bundles.Size
    min_probability: float = 0.0
    reliability: Annotated[tuple[tuple[float, float], ...], Len(0, MOST_POINTS)] = ()
    paths: tuple[RankPath, ...] | None = None

    def __post_init__(self) -> None:
        self.budget()  # raises UserError for values that make none

    @classmethod
    def of(cls, budget: Budget) -> Trees:
        growth = budget.growth
        if isinstance(growth, Static):
            return cls(budget.max_nodes, paths=growth.paths)
        assert isinstance(growth, Grown), growth
        return cls(budget.max_nodes, growth.min_probability, growth.reliability)

    def budget(self) -> Budget:
        grown = Grown(self.min_probability, self.reliability)
        return Budget(self.max_nodes, growth=grown if self.paths is None else Static(self.paths))


@dataclass(frozen=True)
class Candidate:
    """One way to decode; its `trees` are None for plain decoding.

    expected_speedup is predicted from the costs and recorded trees; tokens_per_second, speedup and
    accepted_length are measured in the race; sampled_gain, that of texts drawn at temperature 1, is
    measured only for the winner. A value that was not determined is None. sampled_trust is the
    trust at temperature 1.
    """

    name: str
    trees: Trees | None
    nodes: NumNodes | None = None  # of a tree, on average, root included
    expected_speedup: Ratio | None = None
    tokens_per_second: Rate | None = None
    speedup: Ratio | None = None
    accepted_length: Ratio | None = None
    sampled_gain: Gain | None = None
    sampled_trust: Trusted = 1.0

    @property
    def gain(self) -> Gain:
        """The gain at temperature 0: measured, or else predicted, or else 1 and 1."""
        return Gain(self.accepted_length or 1.0, self.speedup or self.expected_speedup or 1.0)

    @property
    def known(self) -> Known:
        """What a request begins with."""
        gain = self.gain if self.accepted_length else None
        return Known(gain, self.sampled_gain, self.sampled_trust)


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
    takes: Annotated[int, Ge(1), Le(bundles.LARGEST_SIZE)] = 1

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
        return self.choice.trees is None


def key_of(opened: bundles.Bundle, drafter: str, threads: int | None) -> Key:
    """Returns the key of a drafter of this bundle on this machine; `threads` None is the default
    number of threads."""
    manifest = sha256(opened.path / bundles.MANIFEST)
    precision = opened.manifest.target.precision
    found = versions(("specsplit", "onnxruntime", "onnxruntime-gpu"))
    if (native := instructions()) is not None:  # passes cost something else with its operators
        found["native operators"] = native
    names = ", ".join(f"{name} {number}" for name, number in found.items())
    return Key(manifest, cpu_model(), threads or default_threads(), precision, drafter, names)


def path_of(key: Key) -> Path:
    """Returns the file that holds the profile of `key`, whether it exists or not. Raises UserError
    if there is no cache folder."""
    text = json.dumps(dataclasses.asdict(key), sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:20]
    return cache_folder() / "profiles" / f"{key.drafter}-{digest}.json"


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
    write_atomically(path, json.dumps(mapping.to_json(profile), indent=2) + "\n")
    return path


def find(key: Key, *, is_noted: bool = True) -> Profile | None:
    """Returns the profile of `key`, or None if there is none or no cache folder. Warns of a damaged
    profile, where that `is_noted`, and returns None."""
    try:
        path = path_of(key)
    except ValueError:
        return None
    try:
        profile = mapping.from_mapping(Profile, read_kept(path), "profile")
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
