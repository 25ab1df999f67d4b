"""The machine profile: what `spec-runtime tune` measured here, and the budget it chose.

A JSON file in the user's cache folder, found by what it holds true for: bundle, processor, threads,
precision and drafter. Any other machine has other keys, so that its profile is simply not found.
Knows files and keys; does not know how anything is measured or run.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import platform
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from spec_runtime import bundle as bundles
from spec_runtime.backends.threads import default_threads
from spec_runtime.files import sha256, write_atomically
from spec_runtime.mapping import from_mapping, to_json
from spec_runtime.trees.budget import Budget

PLAIN = "plain"  # the candidate that is plain decoding

log = logging.getLogger("spec_runtime")


@dataclass(frozen=True)
class Key:
    """What a profile holds for; `drafter` with "+prompt_lookup" where that is merged."""

    manifest: str  # sha256 of the bundle's manifest, which has the hashes of all its files
    cpu: str
    threads: int
    precision: str
    drafter: str


@dataclass(frozen=True)
class Costs:
    """Milliseconds. verify: pairs (nodes, ms of one pass), ascending. draft: with one level; level:
    each further one. host: accepting, committing and the rest of a step. plain: a whole step of
    plain decoding. prefill: a prompt token."""

    verify: tuple[tuple[float, ...], ...]
    draft: float
    level: float
    host: float
    plain: float
    prefill: float

    def __post_init__(self) -> None:
        times = [self.plain, *(pair[-1] for pair in self.verify)]
        is_measured = all(len(pair) == 2 for pair in self.verify) and len(self.verify) > 0
        if not is_measured or min(times) <= 0 or min(self.draft, self.level, self.host) < 0:
            raise ValueError(f"got costs {self!r:.120}, expected pairs (nodes, ms), all positive")

    def step_ms(self, max_nodes: int) -> tuple[float, ...]:
        """A step with one level of drafting and 1, 2, … max_nodes nodes, interpolated."""
        verify_N = np.interp(np.arange(1, max_nodes + 1), *self._verify_2P)
        return tuple((verify_N + self.draft + self.host).round(4).tolist())

    def of(self, num_nodes: float, num_levels: float) -> float:
        """A step with so many nodes, on average, and levels of drafting."""
        drafting = self.draft + self.level * (num_levels - 1)
        return float(np.interp(num_nodes, *self._verify_2P)) + drafting + self.host

    @cached_property
    def _verify_2P(self) -> np.ndarray:
        return np.array(self.verify, np.float64).T


@dataclass(frozen=True)
class Candidate:
    """One way to decode: `budget` None is plain decoding. Predicted from the costs and the accepted
    lengths known; measured in a real run; None where that was not done."""

    name: str
    budget: Budget | None
    nodes: float | None = None  # of a tree, on average, root included
    expected_speedup: float | None = None
    tokens_per_second: float | None = None
    speedup: float | None = None
    accepted_length: float | None = None

    @property
    def pace(self) -> tuple[float, float]:
        """Accepted length and speed-up, measured or else predicted; 1, 1 where neither is known."""
        return self.accepted_length or 1.0, self.speedup or self.expected_speedup or 1.0


@dataclass(frozen=True)
class Profile:
    """`chosen` names one of the candidates, plain decoding among them. `curve` says where the
    accepted lengths come from: "calibration" (the bundle's) or "run"."""

    key: Key
    costs: Costs
    curve: str
    candidates: tuple[Candidate, ...]
    chosen: str

    def __post_init__(self) -> None:
        if self.chosen not in (names := [candidate.name for candidate in self.candidates]):
            raise ValueError(f"got chosen {self.chosen!r}, expected one of {', '.join(names)}")

    @property
    def choice(self) -> Candidate:
        return next(c for c in self.candidates if c.name == self.chosen)

    @property
    def plain_wins(self) -> bool:
        return self.choice.budget is None


def key_of(opened: bundles.Bundle, drafter: str, threads: int | None) -> Key:
    """For this machine."""
    manifest = sha256(opened.path / bundles.MANIFEST)
    precision = opened.manifest.target.precision
    return Key(manifest, cpu_model(), threads or default_threads(), precision, drafter)


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name; on Linux with family, model and stepping: clouds shorten the name."""
    wanted = ("model name", "cpu family", "model", "stepping")
    try:
        first = cpuinfo.read_text(encoding="utf-8").split("\n\n")[0]
    except OSError:
        first = ""
    pairs = [line.partition(":") for line in first.splitlines()]
    fields = {name.strip(): value.strip() for name, _, value in pairs}
    found = [fields[name] for name in wanted if name in fields]
    return " ".join(found) or platform.processor() or platform.machine()


def cache_folder() -> Path:
    """specsplit's folder in the user's cache (XDG_CACHE_HOME, or ~/.cache)."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "specsplit"


def path_of(key: Key) -> Path:
    text = json.dumps(dataclasses.asdict(key), sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:20]
    return cache_folder() / "profiles" / f"{key.drafter}-{digest}.json"


def write(profile: Profile) -> Path:
    """Write it where `find` looks, by an atomic rename."""
    path = path_of(profile.key)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(to_json(profile), indent=2) + "\n")
    return path


def find(key: Key) -> Profile | None:
    """The profile of `key`, if there is one; a damaged one is a warning."""
    path = path_of(key)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        profile = from_mapping(Profile, data, "profile")
        if profile.key != key:
            raise ValueError("it is of another machine or bundle")
    except FileNotFoundError:
        return None
    except (ValueError, OSError) as error:
        log.warning("%s is ignored: %s; run spec-runtime tune again", path, error)
        return None
    return profile
