"""The public face: load a bundle, generate text, reuse the KV of the common prefix.

A thin layer over generate.py and text.py. It knows what the target's cache holds, and whose it is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack

from spec_runtime import bundle as bundles
from spec_runtime import profile as profiles
from spec_runtime.controller import Controller, corrected
from spec_runtime.generate import CHAIN_LENGTH, Limits, Step, generate
from spec_runtime.kv import open_cache
from spec_runtime.proposers import (
    BUILT_IN,
    BUILT_IN_NODES,
    PROPOSERS,
    PlainProposer,
    Proposer,
)
from spec_runtime.proposers.merged import MergedProposer
from spec_runtime.sampling import SamplingOptions, SamplingParams, TokenLogprob
from spec_runtime.stats import Stats
from spec_runtime.target import STRICT_GAPS, Target
from spec_runtime.text import Codec, Prompt, TextStream, Tokenizer, encode_prompt
from spec_runtime.tree import Budget
from spec_runtime.tree_templates import chain, paths_of

if TYPE_CHECKING:
    from spec_runtime.fused import FusedSteps

DEFAULT_BUDGET = Budget(max_nodes=12)
DEFAULT_LOOKUP_NODES = 6
ALSO = ("prompt_lookup", "none")
JUDGED_STEPS = 64  # a shorter generation says little about its drafter

log = logging.getLogger("spec_runtime")


@dataclass(frozen=True)
class GenerationResult:
    """text without the stop string; token_ids with the EOS or the token that ended it.

    acceptance: greedy, target_sampling, rejection or typical. logprobs: of each of `token_ids`, if
    asked for.
    """

    text: str
    token_ids: list[int]
    finish_reason: str  # stop | length | cancelled
    stats: Stats
    acceptance: str = "greedy"
    logprobs: list[TokenLogprob] | None = None

    @property
    def preserves_distribution(self) -> bool:
        """Whether the tokens follow the target's distribution: typical acceptance's do not."""
        return self.acceptance != "typical"


class OpenedDrafter(NamedTuple):
    """taps: those it reads, of the target's. expected_accepted_length: as measured when the bundle
    was built or checked, if it was."""

    name: str
    proposer: Proposer
    budget: Budget
    taps: tuple[int, ...] = ()
    expected_accepted_length: float | None = None
    fused: FusedSteps | None = None
    is_tuned: bool = False


class Engine:
    """One drafter on one target. Several engines may share a target, one generation at a time."""

    def __init__(
        self,
        target: Target,
        tokenizer: Codec,
        proposer: Proposer,
        *,
        drafter: str = "none",
        budget: Budget = DEFAULT_BUDGET,
        taps: tuple[int, ...] | None = None,
        expected_accepted_length: float | None = None,
        open_drafter: Callable[[str | None, str | None], OpenedDrafter] | None = None,
        fused: FusedSteps | None = None,
        is_tuned: bool = False,
    ) -> None:
        if budget.max_nodes > target.max_nodes:
            raise ValueError(
                f"got trees of {budget.max_nodes} nodes, expected at most the bundle's scratch of "
                f"{target.max_nodes}"
            )
        self.target = target
        self.tokenizer = tokenizer
        self.drafter = drafter
        self.budget = budget
        self.is_tuned = is_tuned  # by a profile of `spec-runtime tune`
        self.last_result: GenerationResult | None = None
        self._proposer = proposer
        self._taps = target.taps if taps is None else taps
        self._expected = expected_accepted_length  # None once a warning is out
        self._open_drafter = open_drafter
        self._fused = fused
        self._run_id = object()
        self._held: list[int] = []  # tokens whose KV the target has, if its holder is our run

    def with_drafter(self, name: str | None, also: str | None = None) -> Engine:
        """An engine on the same target and tokenizer with another drafter ("none" = plain).

        `also`: see `load`.
        """
        if self._open_drafter is None:
            raise ValueError("this engine was not loaded from a bundle: it has one drafter only")
        return _engine(self.target, self.tokenizer, self._open_drafter, name, also)

    @property
    def proposer(self) -> Proposer:
        return self._proposer

    @property
    def fused(self) -> FusedSteps | None:
        """The fused step, if greedy requests take it."""
        return self._fused

    def observed(
        self, wrap: Callable[[Proposer], Proposer], budget: Budget | None = None
    ) -> Engine:
        """An engine on the same target with this one's proposer inside `wrap`'s, and its budget or
        another."""
        return Engine(
            self.target,
            self.tokenizer,
            wrap(self._proposer),
            drafter=self.drafter,
            budget=self.budget if budget is None else budget,
            taps=self._taps,
        )

    def generate(
        self,
        prompt: Prompt,
        *,
        raw: bool = False,
        system: str | None = None,
        reuse: bool = True,
        **sampling: Unpack[SamplingOptions],
    ) -> GenerationResult:
        """The whole answer to a string, messages or token ids.

        raw: a string past the chat template. reuse: keep the KV of the prefix shared with the
        previous call. sampling: the fields of SamplingParams. ValueError for bad arguments and
        for a prompt longer than the context.
        """
        for _ in self.steps(prompt, raw=raw, system=system, reuse=reuse, **sampling):
            pass
        assert self.last_result is not None
        return self.last_result

    def stream(
        self,
        prompt: Prompt,
        *,
        raw: bool = False,
        system: str | None = None,
        reuse: bool = True,
        **sampling: Unpack[SamplingOptions],
    ) -> Generator[str, None, None]:
        """Pieces of the text as they come; closing it early is fine. See also `last_result`."""
        params = SamplingParams(**sampling)
        text = TextStream(self.tokenizer.decode, params.stop)
        steps = self._run(self.encode(prompt, raw, system), params, reuse, text)
        return _pieces(steps, text)

    def steps(
        self,
        prompt: Prompt,
        *,
        raw: bool = False,
        system: str | None = None,
        reuse: bool = True,
        **sampling: Unpack[SamplingOptions],
    ) -> Generator[Step, None, None]:
        """The committed tokens, step by step: the first is the prompt's."""
        params = SamplingParams(**sampling)
        text = TextStream(self.tokenizer.decode, params.stop)
        return self._run(self.encode(prompt, raw, system), params, reuse, text)

    def encode(self, prompt: Prompt, raw: bool = False, system: str | None = None) -> list[int]:
        """The prompt's token ids, checked against vocabulary and context."""
        ids = encode_prompt(self.tokenizer, prompt, raw, system)
        if len(ids) > self.target.max_length:
            raise ValueError(
                f"got a prompt of {len(ids)} tokens, expected at most {self.target.max_length}, the"
                " bundle's context; shorten it or build with a larger --max-length"
            )
        if min(ids) < 0 or max(ids) >= self.target.vocab_size:
            raise ValueError(
                f"got token ids from {min(ids)} to {max(ids)}, expected 0 to "
                f"{self.target.vocab_size - 1}"
            )
        return ids

    def _run(
        self, prompt: list[int], params: SamplingParams, reuse: bool, text: TextStream
    ) -> Generator[Step, None, None]:
        target, proposer = self.target, self._proposer
        is_processed = params.temperature > 0 or params.has_penalties or params.logit_bias
        if target.strict_gap is not None and is_processed:
            raise ValueError(
                f"got temperature {params.temperature}, penalties or a logit bias with strict, "
                "expected none: its near ties are those of the raw logits"
            )
        budget = self.budget
        if target.chains_only:
            params, budget = _as_chains(params, budget)
        ours = target.holder is self._run_id
        # one token early: the boundary's feature and logits have to be computed anew
        reused = max(0, _common_length(self._held, prompt) - 1) if ours and reuse else 0
        run_id = self._run_id = target.holder = object()  # ends any run still open on this target
        target.taps = self._taps
        stop_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            stop_ids |= frozenset(self.tokenizer.eos)
        max_tokens = min(params.max_new_tokens, target.max_length - len(prompt))
        limits = Limits(max_tokens, stop_ids, text.push)
        stats = Stats(prompt_tokens=len(prompt), reused_tokens=reused)
        out: list[int] = []
        logprobs: list[TokenLogprob] | None = None if params.logprobs is None else []
        is_consistent = False
        try:
            target.truncate(reused)
            proposer.truncate(reused)
            self._held = prompt[:reused]
            if limits.finish_reason is None:
                fused = self._fused
                for step in generate(
                    target, proposer, prompt, reused, params, limits, budget, stats, fused
                ):
                    out += step.tokens
                    if logprobs is not None:
                        logprobs += step.logprobs
                    is_consistent = True
                    yield step
                    if target.holder is not run_id:
                        raise RuntimeError("another generation has taken this target meanwhile")
                    is_consistent = limits.finish_reason is not None
            is_consistent = True
        finally:
            if target.holder is run_id:
                if not is_consistent:  # interrupted inside a step
                    target.truncate(0)
                    proposer.truncate(0)
                self._held = (prompt + out)[: target.length]
            text.finish()
            if self._run_id is run_id:  # else a newer run has its own result
                reason = limits.finish_reason or "cancelled"
                self.last_result = GenerationResult(
                    text.text, out, reason, stats, params.rule, logprobs
                )
                if params.rule != "typical":  # its lengths are what its threshold makes them
                    self._judge(stats, is_greedy=params.temperature == 0)

    def _judge(self, stats: Stats, is_greedy: bool) -> None:
        """Warns, once, of the two signatures of a wrong tensor; a wrong drafter changes no token,
        only the speed, so that nothing else would show it."""
        expected, got = self._expected, stats.accepted_length
        if expected is None or stats.steps < JUDGED_STEPS:
            return
        doubt = None
        if sum(stats.depth_trials) == sum(stats.depth_accepts) > 0:
            doubt = f"all drafted tokens were accepted in {stats.steps} steps"
        elif is_greedy and got < expected / 2:  # sampled texts are harder to guess
            doubt = f"accepted length {got:.2f} in {stats.steps} steps, expected about "
            doubt += f"{expected:.2f}"
        if doubt is not None:
            self._expected = None
            log.warning(
                "drafter %s: %s; unless the text is unusual, its weights are not right: run "
                "spec-export check or build the bundle again",
                self.drafter,
                doubt,
            )


def _as_chains(params: SamplingParams, budget: Budget) -> tuple[SamplingParams, Budget]:
    """For a target that takes chains only: at each depth the best candidate, or one that is
    drawn."""
    if params.rule == "rejection":
        widths = tuple(params.draw_widths or (1,) * CHAIN_LENGTH)
        if max(widths) > 1:
            raise ValueError(
                f"got draw_widths {widths}, expected 1 at each depth: this bundle's target takes "
                "chains only (--attention chain)"
            )
        params = replace(params, draw_widths=widths)
    return params, replace(budget, paths=chain(budget.max_nodes - 1))


def _pieces(steps: Generator[Step, None, None], text: TextStream) -> Generator[str, None, None]:
    try:
        for _ in steps:
            if piece := text.take():
                yield piece
        if piece := text.take():
            yield piece
    finally:
        steps.close()


def _common_length(a: list[int], b: list[int]) -> int:
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))


def load(
    path: str | Path,
    drafter: str | None = None,
    threads: int | None = None,
    verify: bool = True,
    also: str | None = None,
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
    if also is not None and also not in ALSO:
        raise ValueError(f"got also {also!r}, expected one of {', '.join(ALSO)}")
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

    def open_tuned(name: str | None, also: str | None) -> OpenedDrafter:
        if is_fused and (opened_fused := open_fused(name, also)) is not None:
            return opened_fused
        drafter = open_drafter(name, also)
        if not profile or drafter.name == "none" or backend != "onnxruntime":
            return drafter
        found = profiles.find(profiles.key_of(opened, drafter.name, threads))
        return drafter if found is None else _tuned(drafter, found)

    def open_drafter(name: str | None, also: str | None) -> OpenedDrafter:
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
            if also == "prompt_lookup":
                raise ValueError(
                    f"got also prompt_lookup with drafter {name}, expected a trained one"
                )
            num_nodes = BUILT_IN_NODES.get(name, DEFAULT_BUDGET.max_nodes)
            return OpenedDrafter(name, proposer, Budget(min(num_nodes, target.max_nodes)))
        budget, lookup_nodes = _budget(entry)
        if also is not None:
            lookup_nodes = (lookup_nodes or DEFAULT_LOOKUP_NODES) if also != "none" else 0
        if target.chains_only and lookup_nodes:
            raise ValueError(
                f"got prompt lookup beside drafter {name}, expected one of them: merged they are a "
                "tree, and this bundle's target takes chains only (--attention chain)"
            )
        if lookup_nodes:
            name, proposer = f"{name}+prompt_lookup", MergedProposer(proposer, lookup_nodes)
        taps = tuple(entry.config.get("taps", info.taps))
        return OpenedDrafter(name, proposer, budget, taps, entry.expected_accepted_length)

    def open_fused(name: str | None, also: str | None) -> OpenedDrafter | None:
        """None: there is no such step, and it was not asked for."""
        from spec_runtime.fused import open_steps  # here: it may pull in an engine

        name = known[0] if name is None else name
        if name == "none" or (fused is None and also == "prompt_lookup"):
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
        if also == "prompt_lookup":
            raise ValueError(
                "got also prompt_lookup with fused, expected one of them: the fused step's trees "
                "are the drafter's alone"
            )
        plain = open_drafter(name, "none")
        steps = open_steps(opened, graph, target, plain.proposer, threads)
        return plain._replace(fused=steps, budget=Budget(min(steps.num_nodes, target.max_nodes)))

    return _engine(target, tokenizer, open_tuned, drafter, also)


def _tuned(opened: OpenedDrafter, profile: profiles.Profile) -> OpenedDrafter:
    """As the profile says; where plain decoding won, without the drafter, which would only cost."""
    choice = profile.choice
    if choice.budget is None:
        log.info("drafter %s: plain decoding is faster here, says the profile", opened.name)
        plain = OpenedDrafter(opened.name, PlainProposer(), Budget(1))
        return plain._replace(taps=opened.taps, is_tuned=True)
    length, speedup = choice.pace
    controller = Controller(corrected(opened.proposer), profile.costs, length, speedup)
    # no warning of short accepted lengths: where they do not pay, it rests
    return opened._replace(
        proposer=controller, budget=choice.budget, expected_accepted_length=None, is_tuned=True
    )


def _engine(
    target: Target,
    tokenizer: Codec,
    open_drafter: Callable[[str | None, str | None], OpenedDrafter],
    name: str | None,
    also: str | None,
) -> Engine:
    opened = open_drafter(name, also)
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

    Keys left out keep their defaults; "paths" or "template" is a static tree, see tree_templates.
    """
    paths = paths_of(entry, DEFAULT_BUDGET.max_nodes)
    max_nodes = DEFAULT_BUDGET.max_nodes if paths is None else 1 + len(paths)
    known: dict[str, Any] = {"max_nodes": max_nodes, "min_probability": 0.0, "lookup_nodes": 0}
    known |= {"paths": None, "template": None}
    if unknown := set(entry.trees) - set(known):
        raise bundles.BundleError(
            f"drafter {entry.name!r}: got trees keys {sorted(unknown)}, expected {list(known)}"
        )
    values = known | entry.trees | {"paths": paths}
    del values["template"]
    lookup_nodes = values.pop("lookup_nodes")
    if type(lookup_nodes) is not int or lookup_nodes < 0:
        raise bundles.BundleError(
            f"drafter {entry.name!r}: got lookup_nodes {lookup_nodes!r}, expected a count"
        )
    return Budget(**values), lookup_nodes


def _unknown(name: str, known: list[str]) -> str:
    return f"got drafter {name!r}, expected one of {', '.join(known)}"
