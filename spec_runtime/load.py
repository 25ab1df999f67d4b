"""Opens a bundle: its target, its tokenizer and one of its drafters, as an engine."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from spec_runtime import bundle as bundles
from spec_runtime import profile as profiles
from spec_runtime.engine import DEFAULT_BUDGET, DEFAULT_LOOKUP_NODES, Engine, OpenedDrafter
from spec_runtime.kv import open_cache
from spec_runtime.proposers import BUILT_IN, BUILT_IN_NODES, PROPOSERS
from spec_runtime.proposers.adaptive import DraftPauser, scale_probabilities
from spec_runtime.proposers.base import PlainProposer
from spec_runtime.proposers.merged import MergedProposer
from spec_runtime.target import STRICT_GAPS, Target
from spec_runtime.text import Codec, Tokenizer
from spec_runtime.trees.budget import Budget, Grown, Static
from spec_runtime.trees.templates import paths_of

log = logging.getLogger("spec_runtime")


def load(
    path: str | Path,
    drafter: str | None = None,
    threads: int | None = None,
    verify: bool = True,
    lookup: bool | None = None,
    profile: bool = True,
    strict: bool = False,
    backend: str = "onnxruntime",
    fused: bool | None = None,
) -> Engine:
    """Opens a bundle. `drafter`: a name from its manifest, "prompt_lookup" or "none" (plain);
    None = the manifest's first, else prompt_lookup. `verify`: check every file's hash first.
    `also`: "prompt_lookup" merges lookup's candidates into a trained drafter's trees, "none" does
    not; None = as the bundle says. `profile`: use what `spec-runtime tune` found on this machine,
    if it was run; else the bundle's own trees. `strict`: tokens at near ties are decided by one-row
    passes, as in plain decoding (greedy; bundles of fp32 and fp16). `backend`: "cuda" runs the
    graphs on ONNX Runtime's CUDA provider, "tensorrt" the plans of a bundle that has some,
    "cuda_eager" and "tensorrt_eager" without CUDA graphs; all without a profile. `fused`: greedy
    requests take the drafter's fused step, one run for draft, verify and accept, with trees of
    fixed size and no other drafter's candidates; None = on CUDA, where the bundle has one.

    ValueError (BundleError for the bundle's own faults), one line, if anything does not fit.
    """
    from spec_runtime.backends import BACKENDS, open_graph  # here: it may pull in an engine

    if backend not in BACKENDS:
        raise ValueError(f"got backend {backend!r}, expected one of {', '.join(BACKENDS)}")
    opened = replace(bundles.read(path, verify), backend=backend)
    info = opened.manifest.target
    known = _drafter_names(opened)
    if drafter is not None and drafter not in known:  # before anything slow
        raise ValueError(_unknown(drafter, known))
    if strict and info.precision not in STRICT_GAPS:
        raise ValueError(
            f"got strict with {info.precision}, expected {' or '.join(STRICT_GAPS)}: rounding of "
            "lower precisions moves more than near ties; leave it out or use another bundle"
        )
    graph = opened.manifest.graphs["target"]
    if strict and graph.attention == "chain":
        raise ValueError(
            f"got strict with attention {graph.attention}, expected {bundles.ATTENTIONS[0]}: it "
            "judges near ties beside the tree, where chains only are right; leave it out or build "
            "the bundle anew"
        )
    tokenizer = Tokenizer(opened)
    capacity = info.max_length + info.scratch
    target = Target(
        open_graph(opened, graph, capacity, threads),
        open_cache(graph.form, capacity, graph.attention),
        vocab_size=info.dims.vocab_size,
        max_length=info.max_length,
        taps=info.taps,
        strict_gap=STRICT_GAPS[info.precision] if strict else None,
    )

    is_fused = backend.startswith("cuda") if fused is None else fused

    def open_tuned(name: str | None, lookup: bool | None) -> OpenedDrafter:
        if is_fused and (opened_fused := open_fused(name, lookup)) is not None:
            return opened_fused
        drafter = open_drafter(name, lookup)
        if not profile or drafter.name == "none" or backend != "onnxruntime":
            return drafter
        found = profiles.find(profiles.key_of(opened, drafter.name, threads))
        return drafter if found is None else _tuned(drafter, found)

    def open_drafter(name: str | None, lookup: bool | None) -> OpenedDrafter:
        name = known[0] if name is None else name
        if name not in known:
            raise ValueError(_unknown(name, known))
        if target.chains_only and name == "lookahead":
            raise ValueError(
                "got drafter lookahead, expected another one: its window is a tree, and this "
                "bundle's target takes chains only (--attention chain)"
            )
        entry = next((d for d in opened.manifest.drafters if d.name == name), None)
        if name not in PROPOSERS:
            raise ValueError(
                f"drafter {name!r} needs a newer runtime: this one has {', '.join(PROPOSERS)}"
            )
        proposer = PROPOSERS[name](opened, entry, threads, target)
        if entry is None:
            if lookup:
                raise ValueError(f"got lookup with drafter {name}, expected a trained one")
            num_nodes = BUILT_IN_NODES.get(name, DEFAULT_BUDGET.max_nodes)
            return OpenedDrafter(name, proposer, Budget(min(num_nodes, target.max_nodes)))
        budget, lookup_nodes = _budget(entry)
        if lookup is not None:
            lookup_nodes = (lookup_nodes or DEFAULT_LOOKUP_NODES) if lookup else 0
        if target.chains_only and lookup_nodes:
            raise ValueError(
                f"got prompt lookup beside drafter {name}, expected one of them: merged they are a "
                "tree, and this bundle's target takes chains only (--attention chain)"
            )
        if lookup_nodes:
            name, proposer = f"{name}+prompt_lookup", MergedProposer(proposer, lookup_nodes)
        taps = tuple(entry.config.get("taps", info.taps))
        return OpenedDrafter(name, proposer, budget, taps, entry.expected_accepted_length)

    def open_fused(name: str | None, lookup: bool | None) -> OpenedDrafter | None:
        """None: there is no such step, and it was not asked for."""
        from spec_runtime.fused import open_steps  # here: it may pull in an engine

        name = known[0] if name is None else name
        if name == "none" or (fused is None and lookup):
            return None  # plain decoding stays the measure of all
        graph = opened.manifest.graphs.get(bundles.fused_name(name))
        if graph is None or backend.startswith("tensorrt"):
            if fused is None or name in BUILT_IN:
                return None
            got = backend if graph is not None else f"a bundle without one for {name}"
            raise ValueError(
                f"got fused with {got}, expected onnxruntime or cuda and a bundle built with "
                f"--fuse --drafter {name}"
            )
        if lookup:
            raise ValueError(
                "got lookup with fused, expected one of them: the fused step's trees "
                "are the drafter's alone"
            )
        plain = open_drafter(name, False)
        steps = open_steps(opened, graph, target, plain.proposer, threads)
        return plain._replace(fused=steps, budget=Budget(min(steps.num_nodes, target.max_nodes)))

    return _engine(target, tokenizer, open_tuned, drafter, lookup)


def _tuned(opened: OpenedDrafter, profile: profiles.Profile) -> OpenedDrafter:
    """As the profile says; where plain decoding won, without the drafter, which would only cost."""
    choice = profile.choice
    if choice.budget is None:
        log.info("drafter %s: plain decoding is faster here, says the profile", opened.name)
        plain = OpenedDrafter(opened.name, PlainProposer(), Budget(1))
        return plain._replace(taps=opened.taps, is_tuned=True)
    length, speedup = choice.pace
    controller = DraftPauser(scale_probabilities(opened.proposer), profile.costs, length, speedup)
    # no warning of short accepted lengths: where they do not pay, it rests
    return opened._replace(
        proposer=controller, budget=choice.budget, expected_accepted_length=None, is_tuned=True
    )


def _engine(
    target: Target,
    tokenizer: Codec,
    open_drafter: Callable[[str | None, str | None], OpenedDrafter],
    name: str | None,
    lookup: bool | None,
) -> Engine:
    opened = open_drafter(name, lookup)
    return Engine(
        target,
        tokenizer,
        opened.proposer,
        drafter=opened.name,
        budget=opened.budget,
        taps=opened.taps,
        expected_accepted_length=opened.expected_accepted_length,
        open_drafter=open_drafter,
        fused=opened.fused,
        is_tuned=opened.is_tuned,
    )


def _drafter_names(opened: bundles.Bundle) -> list[str]:
    names = [d.name for d in opened.manifest.drafters]
    return [*names, *(name for name in BUILT_IN if name not in names)]


def _budget(entry: bundles.DrafterInfo) -> tuple[Budget, int]:
    """The tree budget a bundle gives its drafter, and how many nodes lookup may add to it.

    Keys left out keep their defaults; "paths" or "template" is a static tree, see templates.
    """
    paths = paths_of(entry, DEFAULT_BUDGET.max_nodes)
    max_nodes = DEFAULT_BUDGET.max_nodes if paths is None else 1 + len(paths)
    known: dict[str, Any] = {"max_nodes": max_nodes, "min_probability": 0.0, "lookup_nodes": 0}
    known |= {"paths": None, "template": None}
    if unknown := set(entry.trees) - set(known):
        raise bundles.BundleError(
            f"drafter {entry.name!r}: got trees keys {sorted(unknown)}, expected {list(known)}"
        )
    values = known | entry.trees
    lookup_nodes = values["lookup_nodes"]
    if type(lookup_nodes) is not int or lookup_nodes < 0:
        raise bundles.BundleError(
            f"drafter {entry.name!r}: got lookup_nodes {lookup_nodes!r}, expected a count"
        )
    grown = Grown(values["min_probability"])
    growth = grown if paths is None else Static(paths)
    return Budget(values["max_nodes"], growth=growth), lookup_nodes


def _unknown(name: str, known: list[str]) -> str:
    return f"got drafter {name!r}, expected one of {', '.join(known)}"
