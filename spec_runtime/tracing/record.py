"""Records every step of one generation: its tree, what was accepted, and where the time went."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Unpack

from spec_runtime.calls.call import Run
from spec_runtime.calls.options import CallOptions
from spec_runtime.calls.result import GenerationResult
from spec_runtime.engine import Engine
from spec_runtime.stats import PHASES
from spec_runtime.step import Step
from spec_runtime.text import Codec, Prompt, TextStream
from spec_runtime.trees.tree import TokenTree


@dataclass(frozen=True)
class TracedStep:
    """What one step did. The prompt's step, which is the first, has no tree.

    `path` are the accepted nodes from the root on, and `node_texts` one text a node, as it reads
    behind its parent. `bonus_text` is None where generation ended with a drafted token. `pieces`
    are (text, depth), as in Chunk. `seconds` are those of the step by phase, see Stats.
    """

    tokens: tuple[int, ...]
    num_accepted: int
    seconds: dict[str, float]
    pieces: tuple[tuple[str, int], ...]
    tree: TokenTree | None = None
    path: tuple[int, ...] = ()
    node_texts: tuple[str, ...] = ()
    bonus_text: str | None = None


@dataclass(frozen=True)
class Trace:
    """All steps of one generation."""

    prompt: str
    drafter: str
    steps: tuple[TracedStep, ...]
    result: GenerationResult


@dataclass(frozen=True)
class _Raw:
    """What is kept of a step while generation goes on: nothing here costs time."""

    step: Step
    seconds: dict[str, float]  # of all steps so far


def record(
    engine: Engine,
    prompt: Prompt,
    on_text: Callable[[str], object] = lambda text: None,
    **options: Unpack[CallOptions],
) -> Trace:
    """Generates as `Engine.generate` does, and returns the trace; `on_text` gets the text in pieces
    as they come.

    The drafter's fused step is not taken, since its trees are not known outside of its graph.
    Raises what `Engine.generate` raises.
    """
    ids = engine.encode(prompt, options.pop("raw", False), options.pop("system", None))
    steps = engine.observed(lambda proposer: proposer).steps(ids, **options)
    text = TextStream(engine.tokenizer.decode, _stops(options))
    raw: list[_Raw] = []
    run = Run(steps)
    with closing(steps):
        for step in run:
            assert step.stats is not None, "a fused step"
            raw.append(_Raw(replace(step, features=None, verified=None), dict(step.stats.timings)))
            for token in step.tokens:
                text.push(token)
            on_text(text.take())
    text.finish()
    on_text(text.take())
    prompt_text = engine.tokenizer.decode(ids)
    return Trace(prompt_text, engine.drafter, _traced(engine.tokenizer, raw, options), run.result)


def _stops(options: CallOptions) -> Sequence[str]:
    params = options.get("params")
    stop = options.get("stop", ()) if params is None else params.stop
    return (stop,) if isinstance(stop, str) else stop


def _traced(codec: Codec, raw: Sequence[_Raw], options: CallOptions) -> tuple[TracedStep, ...]:
    """Returns the steps with their texts and each with its own seconds."""
    pieces = _pieces(codec, [each.step for each in raw], _stops(options))
    before = dict.fromkeys(PHASES, 0.0)
    steps = []
    for each, step_pieces in zip(raw, pieces, strict=True):
        step, tree = each.step, each.step.tree
        seconds = {phase: each.seconds[phase] - before[phase] for phase in PHASES}
        before = each.seconds
        traced = TracedStep(tuple(step.tokens), step.num_accepted, seconds, step_pieces)
        if tree is not None:
            path = whole_path(tree, step)
            texts, bonus = node_texts(codec, tree, path, step)
            parts = (tree, tuple(path), tuple(texts), bonus)
            traced = TracedStep(traced.tokens, traced.num_accepted, seconds, step_pieces, *parts)
        steps.append(traced)
    return tuple(steps)


def _pieces(
    codec: Codec, steps: Sequence[Step], stops: Sequence[str]
) -> list[tuple[tuple[str, int], ...]]:
    """Returns the pieces of text that the tokens of each step completed."""
    text = TextStream(codec.decode, stops)
    places = []  # of each token: its step and its depth
    for number, step in enumerate(steps):
        for token, depth in zip(step.tokens, step.depths, strict=True):
            places.append((number, depth))
            text.push(token)
    text.finish()
    found: list[list[tuple[str, int]]] = [[] for _ in steps]
    for token, piece in text.take_pieces():
        number, depth = places[token]
        found[number].append((piece, depth))
    return [tuple(each) for each in found]


def whole_path(tree: TokenTree, step: Step) -> list[int]:
    """Returns the step's accepted nodes, root first: those of its path, and the node of the last
    token if generation ended with a drafted one, whose row is not committed."""
    path = list(step.path)
    if step.num_accepted == len(step.tokens):
        last = step.tokens[-1]
        path.append(next(c for c in tree.children(path[-1]) if int(tree.token_N[c]) == last))
    return path


def node_texts(
    codec: Codec, tree: TokenTree, path: Sequence[int], step: Step
) -> tuple[list[str], str | None]:
    """Returns the text of each node and of the bonus, each as it reads behind what is before it.

    The bonus is None if the step has none.
    """

    def text(before: list[int], token: int) -> str:
        return codec.decode([*before, token])[len(codec.decode(before)) :]

    tokens = tree.token_N
    paths = [tree.path(node) for node in range(tree.num_nodes)]
    texts = [text(tokens[each[:-1]].tolist(), int(tokens[each[-1]])) for each in paths]
    if step.num_accepted == len(step.tokens):
        return texts, None
    return texts, text(tokens[list(path)].tolist(), step.tokens[-1])
