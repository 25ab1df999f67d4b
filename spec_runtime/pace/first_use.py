"""Measures, when a bundle is first opened on a machine, what passes and drafts cost there.

Drafting is safe without `tune`: with these costs trees are sized by the tokens that a millisecond
is expected to give, and drafting pauses where it does not pay (see pace/pacer.py). `tune` decodes
real prompts as well, and finds more.
"""

import logging
import time
from dataclasses import replace

import numpy as np

from spec_runtime.bundle.manifest import DrafterInfo
from spec_runtime.engine import Engine
from spec_runtime.errors import UserError
from spec_runtime.files.writing import LockedError
from spec_runtime.pace.costs import Costs
from spec_runtime.pace.measured import costs_of, draft_ms, measure_passes, record, without_lookup
from spec_runtime.pace.profile import (
    FIRST_USE,
    Candidate,
    Key,
    Profile,
    Trees,
    find,
    reserved,
    write,
)
from spec_runtime.pace.reliability import monotone
from spec_runtime.trees.budget import Budget

SIZES = (1, 8, 16, 4, 32, 2)  # the last ones are left out where passes are slow
WAIT_SECONDS = 10.0  # for another process
PASS_SECONDS = 0.9  # for each of two contexts
NUM_NODES, NUM_DEPTHS = 16, 2
ANSWER_SECONDS, NUM_TOKENS = 0.4, (3, 8)  # of an answer: 3 tokens, and up to 8 if there is time
LEAST_CONTEXT = 64
PROMPT = 2 * tuple(range(100, 116))  # ids of a text that repeats itself

log = logging.getLogger("spec_runtime")


def profile_for(engine: Engine, key: Key, entry: DrafterInfo | None) -> Profile | None:
    """Returns the profile of `engine`'s drafter, measured in about two seconds (three where a pass
    takes a tenth of one), and keeps it where `find` looks for it, if that can be written.

    `entry` is the drafter's in the bundle's manifest, if it has one. Where another process measures
    the same, its profile is waited for. Costs that are not settled are measured again, and those of
    the smaller spread are kept. Returns None for a context that is too short to measure.
    """
    if engine.target.max_length < LEAST_CONTEXT:
        return None
    try:
        with reserved(key):
            kept = find(key, is_noted=False)
            if kept is not None and kept.is_settled:
                return kept
            profile = _measured(engine, key, entry)
            if kept is not None:
                steadier = min(profile, kept, key=lambda each: each.costs.spread)
                profile = replace(steadier, takes=kept.takes + 1)
            write(profile)
            return profile
    except LockedError:
        return _awaited(key) or _measured(engine, key, entry)
    except (UserError, OSError):  # nothing can be kept here
        return _measured(engine, key, entry)


def _awaited(key: Key) -> Profile | None:
    """Returns the profile once another process has kept it; None if it never does."""
    end = time.monotonic() + WAIT_SECONDS
    while (profile := find(key, is_noted=False)) is None and time.monotonic() < end:
        time.sleep(0.05)
    return profile


def _measured(engine: Engine, key: Key, entry: DrafterInfo | None) -> Profile:
    begin = time.perf_counter()
    target = engine.target
    sizes = [n for n in SIZES if n <= target.max_nodes]
    prompt = [token % target.vocab_size for token in PROMPT]
    passes = measure_passes(target, prompt, sizes, engine.wants, PASS_SECONDS, least=0)
    limit = int(passes[0].verify[-1][0])
    unmerged, num_nodes = engine.observed(without_lookup), min(NUM_NODES, limit)
    pass_seconds = dict(passes[0].verify)[num_nodes] / 1000
    num_tokens = int(np.clip(ANSWER_SECONDS / pass_seconds, *NUM_TOKENS))
    recorder, run = record(unmerged, Budget(num_nodes), [prompt], num_tokens, ignore_eos=True)
    drafting = draft_ms(unmerged, recorder, prompt, num_nodes, NUM_DEPTHS, num_tokens)
    costs = costs_of(passes, *drafting, run)
    chosen = _candidate(engine, costs, limit, entry)
    profile = Profile(key, costs, FIRST_USE, (chosen,), chosen.name)
    log.info(
        "measured in %.1f s what drafts with %s cost on this machine, once for this bundle%s",
        time.perf_counter() - begin,
        engine.drafter,
        "" if profile.is_settled else "; it was busy: a later load measures it again",
    )
    return profile


def _candidate(engine: Engine, costs: Costs, limit: int, entry: DrafterInfo | None) -> Candidate:
    """Returns the bundle's trees, and of a calibrated drafter the reliability. What the manifest
    says of its accepted length is what each request begins with."""
    trees = Trees.of(engine.budget.at_most(limit))
    lengths: dict[float, float] = {}  # by the nodes of a tree
    if entry is not None and entry.expected_accepted_length is not None:
        lengths = {trees.max_nodes / 2: entry.expected_accepted_length}
    if entry is not None and entry.calibration is not None:
        trees = Trees(limit, reliability=monotone(entry.calibration["reliability"]))
        lengths = {float(n): of for n, of in entry.calibration["accepted_length"].items()}
    gains = [
        (length * costs.plain / costs.of(nodes, max(1.0, length)), length)
        for nodes, length in lengths.items()
        if length > 0
    ]
    if not gains:
        return Candidate("bundle", trees)
    speedup, length = max(gains)
    return Candidate(
        "bundle", trees, expected_speedup=round(speedup, 4), accepted_length=round(length, 4)
    )
