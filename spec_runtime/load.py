"""Opens a bundle: its target, its tokenizer and one of its drafters, as an engine."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral
from pathlib import Path
from typing import Any

from spec_runtime import backends
from spec_runtime import profile as profiles
from spec_runtime.backends import Runtime
from spec_runtime.bundle import manifest as bundles
from spec_runtime.engine import Engine, OpenedDrafter
from spec_runtime.errors import UnknownDrafterError, UserError
from spec_runtime.files.writing import sha256
from spec_runtime.kv import open_cache
from spec_runtime.mapping import from_mapping
from spec_runtime.proposers import BUILT_IN, BUILT_IN_NODES, PROPOSERS, VARIANTS
from spec_runtime.proposers.adaptive import DraftPauser, scale_probabilities
from spec_runtime.proposers.base import PlainProposer, Proposer
from spec_runtime.proposers.lookup import LookupProposer
from spec_runtime.proposers.merged import MergedProposer
from spec_runtime.target import STRICT_GAPS, Target
from spec_runtime.text.tokenizer import Tokenizer
from spec_runtime.trees.budget import Budget, Grown, Static
from spec_runtime.trees.templates import paths_of

DEFAULT_BUDGET = Budget(max_nodes=12)
DEFAULT_LOOKUP_NODES = 6

log = logging.getLogger("spec_runtime")


@dataclass(frozen=True)
class _Arguments:
    """Checks the types of `load`'s arguments, whose names and meanings these fields have."""

    path: str
    drafter: str | None
    threads: int | None
    verify: bool
    lookup: bool | None
    profile: bool
    strict: bool
    backend: str
    fused: bool | None
    cuda_graphs: bool
    memory: int
    map_weights: bool
    kept_mb: int

    def __post_init__(self) -> None:
        if self.memory < 0:
            raise UserError(f"got memory {self.memory}, expected 0 or more tokens", param="memory")
        if self.kept_mb < 0:
            raise UserError(
                f"got kept_mb {self.kept_mb}, expected 0 or more megabytes", param="kept_mb"
            )


@dataclass(frozen=True)
class LoadOptions:
    """Says how a bundle's drafters are opened; the fields are those of `load`."""

    runtime: Runtime
    profile: bool = True
    fused: bool | None = None
    memory: int = 0

    @property
    def prefers_fused(self) -> bool:
        """Says whether a fused step is taken where there is one."""
        is_cuda = (self.runtime.engine, self.runtime.device) == ("onnxruntime", "cuda")
        return is_cuda if self.fused is None else self.fused


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
    cuda_graphs: bool = True,
    memory: int = 0,
    map_weights: bool = False,
    kept_mb: int = 0,
) -> Engine:
    """Opens a bundle and returns an engine that generates with it.

    Args:
        path: the bundle's folder, or "hf://org/name", which is fetched once (see hub.pull.cached).
        drafter: a name from its manifest, "prompt_lookup", "lookahead" or "none" (plain decoding).
            None takes the manifest's first, or prompt_lookup if there is none.
        threads: CPU threads; None takes as many as this process may use.
        verify: check every file's hash first.
        lookup: merge prompt lookup's candidates into a trained drafter's trees; None does as the
            bundle says.
        profile: use what `spec-runtime tune` found on this machine, if it was run; otherwise the
            bundle's own trees.
        strict: decide tokens at near ties by one-row passes, as plain decoding does (greedy; for
            fp32 and fp16 bundles).
        backend: "onnxruntime" is the CPU, "cuda" ONNX Runtime's CUDA provider, and "tensorrt" runs
            the plans of a bundle that has some. Profiles hold for the CPU only.
        fused: greedy requests take the drafter's fused step: one run drafts, verifies and accepts,
            with trees of a fixed size and no other drafter's candidates. None takes it on CUDA,
            where the bundle has one that ONNX Runtime opens and can capture; otherwise the
            ordinary loop runs, and a warning says why.
        cuda_graphs: capture runs that come again and replay them; on the CPU it says nothing.
        memory: prompt lookup, alone or merged, also looks up at most so many tokens of this
            engine's earlier answers. No token changes, but a request that repeats an earlier answer
            gets faster, which its sender can notice: do not share such an engine between users who
            must not learn of each other's answers.
        map_weights: map weights, packed for this CPU, from files in the user's cache folder, which
            take twice the bundle's room; other processes share them then. CPU only. The engines of
            one process share weights without it.
        kept_mb: keep the KV of earlier conversations, and what the drafter reads of them, in so
            many megabytes; that least recently used goes. A conversation that goes on, or shares a
            beginning, then needs not be read again. Backend "onnxruntime" only.

    Raises:
        ValueError: in one line, if anything does not fit; BundleError for the bundle's own faults.
    """
    given = dict(locals())
    given["path"] = os.fspath(path) if isinstance(path, os.PathLike) else path
    for name in ("threads", "memory", "kept_mb"):
        given[name] = _plain_int(given[name])
    threads, memory, kept_mb = given["threads"], given["memory"], given["kept_mb"]
    from_mapping(_Arguments, given, "load", none="None")
    runtime = Runtime(backend, threads, cuda_graphs, map_weights)
    options = LoadOptions(runtime, profile, fused, memory)
    bundle = bundles.read(_local(path), verify)
    known = _drafter_names(bundle)
    if drafter is not None and drafter not in (*known, *VARIANTS):  # before anything slow
        raise UnknownDrafterError(drafter, known)
    if strict:
        _require_strictness(bundle.manifest)
    tokenizer = Tokenizer(bundle)
    target = _open_target(bundle, options.runtime, strict)
    opener = DrafterOpener(bundle, target, options)
    opened = opener.open(drafter, lookup)
    if memory and opened.name.rpartition("+")[2] != "prompt_lookup":
        raise UserError(
            f"got memory with drafter {opened.name}, expected prompt_lookup, or a trained drafter "
            "with lookup",
            param="memory",
        )
    return Engine(target, tokenizer, opened, opener, kept_mb << 20)


def _local(path: str | Path) -> str | Path:
    """Returns the folder of a bundle; fetches that of "hf://org/name" if it is not there yet."""
    if isinstance(path, str) and path.startswith("hf://"):
        from spec_runtime.hub.pull import cached  # here: few need it

        return cached(path)
    return path


def _open_target(bundle: bundles.Bundle, runtime: Runtime, strict: bool) -> Target:
    info, graph = bundle.manifest.target, bundle.manifest.graphs["target"]
    capacity = info.max_length + info.scratch
    backend = backends.open_graph(bundle, graph, capacity, runtime)
    return Target(
        backend,
        open_cache(graph.form, capacity),
        vocab_size=info.dims.vocab_size,
        max_length=info.max_length,
        precision=info.precision,
        strict_gap=STRICT_GAPS[info.precision] if strict else None,
        sampling=backends.open_sampling(bundle, backend, runtime),
    )


class DrafterOpener:
    """Opens drafters of one bundle, all on the same target.

    `open` takes the fused step where the options ask for it, and otherwise the profile of this
    machine where there is one.
    """

    def __init__(self, bundle: bundles.Bundle, target: Target, options: LoadOptions) -> None:
        self._bundle, self._target, self._options = bundle, target, options
        self._known = _drafter_names(bundle)

    @cached_property
    def bundle_hash(self) -> str:
        """See engine.DrafterSource."""
        return sha256(self._bundle.path / bundles.MANIFEST)

    def open(self, name: str | None, lookup: bool | None) -> OpenedDrafter:
        """Opens the drafter `name`, None = the first; `lookup` is that of `load`.

        Raises ValueError for an unknown name and for what the bundle cannot do.
        """
        name = self._known[0] if name is None else name
        if self._options.prefers_fused:
            fused = self._open_fused(name, lookup)
            if fused is not None:
                return fused
        opened = self._open(name, lookup)
        runtime = self._options.runtime
        if not self._options.profile or name == "none" or runtime.backend != "onnxruntime":
            return opened
        profile = profiles.find(profiles.key_of(self._bundle, opened.name, runtime.threads))
        return opened if profile is None else _tuned(opened, profile)

    def _open(self, name: str, lookup: bool | None) -> OpenedDrafter:
        """Opens a drafter with the bundle's own trees."""
        if name not in (*self._known, *VARIANTS):
            raise UnknownDrafterError(name, self._known)
        target = self._target
        factories = PROPOSERS | VARIANTS
        if name not in factories:
            raise UserError(
                f"drafter {name!r} needs a newer runtime: this one has {', '.join(PROPOSERS)}"
            )
        drafters = self._bundle.manifest.drafters
        entry = next((info for info in drafters if info.name == name), None)
        memory = self._options.memory
        proposer: Proposer
        if memory and name == "prompt_lookup":
            proposer = LookupProposer(memory)
        else:
            proposer = factories[name](self._bundle, entry, self._options.runtime, target)
        if entry is None:
            if lookup:
                raise UserError(
                    f"got lookup with drafter {name}, expected a trained one", param="lookup"
                )
            num_nodes = BUILT_IN_NODES.get(name, DEFAULT_BUDGET.max_nodes)
            return OpenedDrafter(name, proposer, Budget(min(num_nodes, target.max_nodes)))
        budget, lookup_nodes = _budget(entry)
        if lookup is not None:
            lookup_nodes = (lookup_nodes or DEFAULT_LOOKUP_NODES) if lookup else 0
        if lookup_nodes:
            name = f"{name}+prompt_lookup"
            proposer = MergedProposer(proposer, lookup_nodes, memory)
        taps = tuple(entry.config.get("taps", self._bundle.manifest.target.taps))
        return OpenedDrafter(name, proposer, budget, taps, entry.expected_accepted_length)

    def _open_fused(self, name: str, lookup: bool | None) -> OpenedDrafter | None:
        """Opens a drafter with its fused step; None if there is none and it was not asked for.

        A fused step that was not asked for has to open and, where CUDA graphs are wanted, to be
        captured; otherwise this returns None and warns.
        """
        from spec_runtime.fused_steps import open_steps  # here: it imports an engine

        is_asked_for = self._options.fused is not None
        if name == "none" or (not is_asked_for and lookup):
            return None  # plain decoding stays the measure of all
        runtime = self._options.runtime
        graph = self._bundle.manifest.graphs.get(bundles.fused_name(name))
        if graph is None or runtime.engine == "tensorrt":
            if not is_asked_for or name in BUILT_IN:
                return None
            got = runtime.backend if graph is not None else f"a bundle without one for {name}"
            raise UserError(
                f"got fused with {got}, expected onnxruntime or cuda and a bundle built with "
                f"--fuse --drafter {name}",
                param="fused",
            )
        if lookup:
            raise UserError(
                "got lookup with fused, expected one of them: the fused step's trees are the "
                "drafter's only",
                param="lookup",
            )
        opened = self._open(name, lookup=False)
        proposer, must_capture = opened.proposer, not is_asked_for
        try:
            steps = open_steps(self._bundle, graph, self._target, proposer, runtime, must_capture)
        except ValueError as error:
            if is_asked_for:
                raise
            log.warning("drafter %s goes without its fused step: %s", name, error)
            return None
        budget = Budget(min(steps.num_nodes, self._target.max_nodes))
        return opened._replace(fused=steps, budget=budget)


def _tuned(opened: OpenedDrafter, profile: profiles.Profile) -> OpenedDrafter:
    """Applies the tuned profile. If plain decoding was fastest, drops the drafter."""
    choice = profile.choice
    if choice.budget is None:
        log.info("drafter %s: plain decoding is faster here, says the profile", opened.name)
        plain = OpenedDrafter(opened.name, PlainProposer(), Budget(1))
        return plain._replace(taps=opened.taps, is_tuned=True)
    scaled = scale_probabilities(opened.proposer)
    pauser = DraftPauser(scaled, profile.costs, choice.gain, choice.sampled_gain)
    # Short accepted lengths cause no warning here: where they do not pay, the drafter pauses.
    return opened._replace(
        proposer=pauser, budget=choice.budget, expected_accepted_length=None, is_tuned=True
    )


def _require_strictness(manifest: bundles.Manifest) -> None:
    """Refuses `strict` for targets whose near ties one-row passes cannot decide."""
    precision = manifest.target.precision
    if precision not in STRICT_GAPS:
        raise UserError(
            f"got strict with {precision}, expected {' or '.join(STRICT_GAPS)}: rounding of "
            "lower precisions moves more than near ties; leave it out or use another bundle",
            param="strict",
        )


def _drafter_names(bundle: bundles.Bundle) -> list[str]:
    names = [info.name for info in bundle.manifest.drafters]
    return [*names, *(name for name in BUILT_IN if name not in names)]


def _plain_int(value: Any) -> Any:
    """Returns NumPy's integers as Python's, everything else as it is."""
    is_integer = isinstance(value, Integral) and not isinstance(value, bool)
    return int(value) if is_integer else value


def _budget(entry: bundles.DrafterInfo) -> tuple[Budget, int]:
    """Returns the tree budget that a bundle gives its drafter, and how many nodes of a tree prompt
    lookup may add.

    Keys left out keep their defaults; "paths" or "template" is a static tree, see trees/templates.
    """
    paths = paths_of(entry, DEFAULT_BUDGET.max_nodes)
    max_nodes = DEFAULT_BUDGET.max_nodes if paths is None else 1 + len(paths)
    known: dict[str, Any] = {"max_nodes": max_nodes, "min_probability": 0.0, "lookup_nodes": 0}
    known |= {"paths": None, "template": None}
    if unknown := set(entry.trees) - set(known):
        raise bundles.BundleError(
            f"drafter {entry.name!r}: got trees keys {sorted(unknown)!r:.200}, expected "
            f"{list(known)}"
        )
    values = known | entry.trees
    lookup_nodes = values["lookup_nodes"]
    if type(lookup_nodes) is not int or lookup_nodes < 0:
        raise bundles.BundleError(
            f"drafter {entry.name!r}: got lookup_nodes {lookup_nodes!r:.60}, expected a count"
        )
    grown = Grown(values["min_probability"])
    growth = grown if paths is None else Static(paths)
    return Budget(values["max_nodes"], growth=growth), lookup_nodes
