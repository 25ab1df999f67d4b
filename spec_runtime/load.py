"""Opens a bundle: its target, its tokenizer and one of its drafters, as an engine."""

import logging
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, TypedDict, Unpack

from annotated_types import Ge

from spec_runtime import backends
from spec_runtime.backends import Runtime
from spec_runtime.batch.batch import Batch
from spec_runtime.bundle import manifest as bundles
from spec_runtime.bundle.memory import available_bytes, buffer_bytes
from spec_runtime.engine import Engine
from spec_runtime.errors import UnknownDrafterError, UserError
from spec_runtime.files.machine import warn_of_threads
from spec_runtime.files.mapping import require_keys
from spec_runtime.loop.kv import open_cache
from spec_runtime.loop.proposer import OpenedDrafter, PlainProposer
from spec_runtime.loop.target import STRICT_GAPS, SharedPasses, Target
from spec_runtime.options import Option
from spec_runtime.pace import first_use, warm_up
from spec_runtime.pace import profile as profiles
from spec_runtime.pace.pacer import Pacer
from spec_runtime.proposers import BUILT_IN, BUILT_IN_NODES, PROPOSERS
from spec_runtime.proposers.merged import MergedProposer
from spec_runtime.text.tokenizer import Tokenizer
from spec_runtime.trees.budget import Budget, Grown, Static
from spec_runtime.trees.templates import paths_of

DEFAULT_BUDGET = Budget(max_nodes=12)
DEFAULT_LOOKUP_NODES = 6
KEPT_TOKENS, MOST_KEPT_BYTES = 8192, 1 << 30  # of earlier conversations, where kept_mb is None

log = logging.getLogger("spec_runtime")


@dataclass(frozen=True, kw_only=True)
class LoadOptions(Runtime):
    """Says how a bundle is opened: what runs its graphs, and how it drafts.

    drafter: a name from the manifest, "prompt_lookup", "lookahead" or "none" (plain decoding). None
    takes the manifest's first, or prompt_lookup if there is none. lookup: None does as the bundle
    says. verify: check every file's hash first. profile: otherwise the bundle's own trees. strict:
    decide tokens at near ties by one-row passes, as plain decoding does.

    backend: "onnxruntime" is the CPU, "cuda" ONNX Runtime's CUDA provider, and "tensorrt" runs the
    plans of a bundle that has some. Profiles hold for the CPU only.

    kept_mb: what was used least recently goes first. A conversation that goes on, or
    shares a beginning, then needs not be read again. Backend "onnxruntime" only; None keeps what
    8192 tokens take, at most 1024, where rows can be kept.
    """

    drafter: Annotated[
        str | None,
        Option(
            "A drafter of the bundle, prompt_lookup, lookahead, or none", unset="the bundle's first"
        ),
    ] = None
    lookup: Annotated[
        bool | None,
        Option(
            "Merge prompt lookup's candidates into a trained drafter's trees",
            unset="as the bundle says",
        ),
    ] = None
    profile: Annotated[
        bool,
        Option(
            "Size trees by what they cost on this machine, as tune or the first use found it, and "
            "pause where drafts do not pay"
        ),
    ] = True
    strict: Annotated[bool, Option("Decide near ties by one-row passes (fp32, fp16; greedy)")] = (
        False
    )
    kept_mb: Annotated[
        int | None,
        Ge(0),
        Option(
            "Megabytes for the KV of earlier conversations, which then go on without being read "
            "again; how fast an answer comes tells clients whether its prompt was asked before",
            unset="on the CPU what 8192 tokens take, at most 1024",
        ),
    ] = 0
    context: Annotated[
        int | None,
        Ge(16),
        Option("Tokens of prompt and answer for which caches have room", unset="the bundle's"),
    ] = None
    verify: Annotated[bool, Option("Check the hash of every file of the bundle first")] = True


class LoadArguments(TypedDict, total=False):
    """Lists the keyword arguments of `load` after the first three: the fields of LoadOptions."""

    # made by tools/docs/typed_arguments.py
    backend: str
    cuda_graphs: bool
    lookup: bool | None
    profile: bool
    strict: bool
    kept_mb: int | None
    context: int | None
    verify: bool


def load(
    path: str | Path,
    drafter: str | None = None,
    threads: int | None = None,
    **arguments: Unpack[LoadArguments],
) -> Engine:
    """Opens a bundle and returns an engine that generates with it.

    `path` is the bundle's folder, or "hf://org/name", which is fetched once (see
    hub.pull.open_cached). The other arguments are the fields of LoadOptions: `load(path,
    drafter="none", threads=2)`.

    Raises UserError, in one line, if anything does not fit: BundleError for the bundle's own
    faults, UnknownDrafterError for a drafter that it has not.
    """
    if not isinstance(path, str | os.PathLike):
        raise UserError(f"got path {path!r:.60}, expected the folder of a bundle", param="path")
    options = LoadOptions(drafter=drafter, threads=threads, **arguments)
    warn_of_threads(options.threads)
    if isinstance(path, str) and path.startswith("hf://"):
        from spec_runtime.hub.pull import open_cached  # here: few need it

        bundle = open_cached(path, options.verify)
    else:
        bundle = bundles.read(path, options.verify)
    bundle = _shortened(bundle, options.context)
    known = drafter_names(bundle.manifest)
    if drafter is not None and drafter not in known:  # before anything slow
        raise UnknownDrafterError(drafter, known)
    precision = bundle.manifest.target.precision
    if options.strict and precision not in STRICT_GAPS:
        raise UserError(
            f"got strict with {precision}, expected {' or '.join(STRICT_GAPS)}: rounding of "
            "lower precisions moves more than near ties; leave it out or use another bundle",
            param="strict",
        )
    tokenizer = Tokenizer(bundle)
    target = _open_target(bundle, options)
    opener = DrafterOpener(bundle, target, tokenizer, options)
    opened = opener.open(drafter, options.lookup)
    kept_bytes = _kept_bytes(bundle, target, options.kept_mb)
    engine = Engine(target, tokenizer, opened, opener, kept_bytes)
    if options.has_cuda_graphs and options.engine == "onnxruntime":
        warm_up.capture_shapes(engine)
    return engine


def _shortened(bundle: bundles.Bundle, context: int | None) -> bundles.Bundle:
    """Returns the bundle with a context of at most so many tokens."""
    info = bundle.manifest.target
    if context is None or context >= info.max_length:
        return bundle
    manifest = replace(bundle.manifest, target=replace(info, max_length=context))
    return replace(bundle, manifest=manifest)


def _open_target(bundle: bundles.Bundle, options: LoadOptions) -> Target:
    info, graph = bundle.manifest.target, bundle.manifest.graphs["target"]
    capacity = _capacity(info)
    backend = backends.open_graph(bundle, graph, capacity, options)
    return Target(
        backend,
        open_cache(graph.form, capacity, backend),
        vocab_size=info.dims.vocab_size,
        max_length=info.max_length,
        feature_widths=bundles.feature_widths(graph),
        precision=info.precision,
        has_exact_rows=info.precision == "fp32" or getattr(backend, "has_exact_rows", False),
        strict_gap=STRICT_GAPS[info.precision] if options.strict else None,
        sampling=backends.open_sampling(bundle, backend, options),
    )


def _kept_bytes(bundle: bundles.Bundle, target: Target, kept_mb: int | None) -> int:
    """Returns how many bytes of earlier conversations are kept, by `kept_mb` of LoadOptions."""
    if kept_mb is not None:
        return kept_mb << 20
    of_tokens = buffer_bytes(bundle.manifest.graphs["target"], KEPT_TOKENS)
    return min(of_tokens, MOST_KEPT_BYTES) if target.keeps_rows else 0


def _capacity(info: bundles.TargetInfo) -> int:
    """Returns how many rows a cache has: those of the context, and of the largest tree."""
    return info.max_length + info.scratch


class DrafterOpener:
    """Opens drafters of one bundle, all on the same target.

    `open` takes the profile of this machine, which it measures where there is none.
    """

    def __init__(
        self, bundle: bundles.Bundle, target: Target, tokenizer: Tokenizer, options: LoadOptions
    ) -> None:
        self._bundle, self._target, self._tokenizer = bundle, target, tokenizer
        self._options = options
        self.names = drafter_names(bundle.manifest)
        self._measured: dict[profiles.Key, profiles.Profile] = {}

    def open(self, name: str | None, lookup: bool | None) -> OpenedDrafter:
        """Opens the drafter `name`, None = the first; `lookup` is that of `load`.

        Raises UserError for an unknown name and for what the bundle cannot do.
        """
        options = replace(self._options, drafter=name, lookup=lookup)  # checked
        name = self.names[0] if name is None else name
        opened = self._open(name, lookup)
        if not options.profile or name == "none" or options.backend != "onnxruntime":
            return opened
        key = profiles.key_of(self._bundle, opened.name, options.threads)
        is_new = key not in self._measured  # what one lane has said or measured stands for all
        profile = profiles.find(key, is_noted=is_new) or self._measured.get(key)
        is_settled = profile is not None and profile.is_settled
        if is_new and not is_settled and self._target.lock.is_free_for_thread:
            engine = Engine(self._target, self._tokenizer, opened)
            entry = self._bundle.manifest.entry(name)
            measured = first_use.profile_for(engine, key, entry)
            if measured is not None:
                profile = self._measured[key] = measured  # also where nothing can be kept
        if profile is None:
            return opened
        tuned = _tuned(opened, profile)
        # A profile is also found with options that leave less room, as `strict` does.
        return tuned._replace(budget=tuned.budget.at_most(self._target.max_nodes))

    def open_lane(self, engine: Engine) -> Engine:
        """Opens an engine like this one on a target of its own, with the same weights."""
        target = _open_target(self._bundle, self._options)
        opener = DrafterOpener(self._bundle, target, self._tokenizer, self._options)
        opener._measured = self._measured
        name, _, merged = engine.drafter.partition("+")
        opened = opener.open(name, bool(merged))._replace(budget=engine.budget)
        kept_bytes = _kept_bytes(self._bundle, target, self._options.kept_mb)
        return Engine(target, engine.tokenizer, opened, opener, kept_bytes, engine)

    def free_bytes(self) -> int:
        """Returns how much memory there is for the caches of lanes, where these lie."""
        backend = self._target.lend()[0]
        if isinstance(backend, backends.DeviceBackend):
            return backend.free_bytes
        return available_bytes()

    def lane_bytes(self, drafter: str) -> int:
        """Returns the bytes of the caches that a lane with this drafter has."""
        manifest = self._bundle.manifest
        capacity, entry = _capacity(manifest.target), manifest.entry(drafter)
        graphs = [] if entry is None else entry.graphs.values()
        return sum(buffer_bytes(graph, capacity) for graph in [manifest.graphs["target"], *graphs])

    def open_passes(self) -> SharedPasses | None:
        """Opens what runs a pass for several lanes, see backends.open_lanes."""
        return backends.open_lanes(self._bundle, self._options)

    def open_batch(self, engine: Engine, parallel: int) -> Batch:
        """See batch.batch.Batch."""
        return Batch(engine, parallel)

    def _open(self, name: str, lookup: bool | None) -> OpenedDrafter:
        """Opens a drafter with the bundle's own trees."""
        if name not in self.names:
            raise UnknownDrafterError(name, self.names)
        target = self._target
        if name not in PROPOSERS:
            raise UserError(
                f"drafter {name!r} needs a newer runtime: this one has {', '.join(PROPOSERS)}"
            )
        entry = self._bundle.manifest.entry(name)
        proposer = PROPOSERS[name](self._bundle, entry, self._options, target)
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
            proposer = MergedProposer(proposer, lookup_nodes)
        features = self._bundle.manifest.feature_outputs(entry)
        return OpenedDrafter(name, proposer, budget, features, entry.expected_accepted_length)


def _tuned(opened: OpenedDrafter, profile: profiles.Profile) -> OpenedDrafter:
    """Applies the tuned profile. If plain decoding was fastest, drops the drafter."""
    choice = profile.choice
    if choice.trees is None:
        log.debug("drafter %s: plain decoding is faster here, says the profile", opened.name)
        plain = OpenedDrafter(opened.name, PlainProposer(), Budget(1))
        return plain._replace(features=opened.features, is_tuned=True)
    pacer = Pacer(opened.proposer, profile.costs, choice.known)
    budget = choice.trees.budget()
    return opened._replace(proposer=pacer, budget=budget, is_tuned=profile.is_tuned)


def drafter_names(manifest: bundles.Manifest) -> list[str]:
    """Returns the names of a bundle's drafters, and after them the built-in ones'."""
    names = [info.name for info in manifest.drafters]
    return [*names, *(name for name in BUILT_IN if name not in names)]


def _budget(entry: bundles.DrafterInfo) -> tuple[Budget, int]:
    """Returns the tree budget that a bundle gives its drafter, and how many nodes of a tree prompt
    lookup may add.

    Keys left out keep their defaults; "paths" or "template" is a static tree, see trees/templates.
    """
    paths = paths_of(entry, DEFAULT_BUDGET.max_nodes)
    max_nodes = DEFAULT_BUDGET.max_nodes if paths is None else 1 + len(paths)
    known: dict[str, Any] = {"max_nodes": max_nodes, "min_probability": 0.0, "lookup_nodes": 0}
    known |= {"paths": None, "template": None}
    require_keys(entry.trees, known, (), f"drafter {entry.name!r}: trees", bundles.BundleError)
    values = known | entry.trees
    growth = Grown(values["min_probability"]) if paths is None else Static(paths)
    return Budget(values["max_nodes"], growth=growth), values["lookup_nodes"]
