"""Records every step of one generation: its tree, the accepted path, and where the time went."""

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Unpack

from spec_runtime.engine import Engine
from spec_runtime.loop.options import CallOptions
from spec_runtime.loop.result import GenerationResult
from spec_runtime.loop.stats import PHASES
from spec_runtime.loop.step import Step
from spec_runtime.text.prompt import Prompt
from spec_runtime.text.tokenizer import Codec
from spec_runtime.trees.tree import TokenTree


@dataclass(frozen=True)
class TracedStep:
    """One step of a generation. The prompt's step, which is the first, has no tree.

    `path` are the accepted nodes from the root on, and `node_texts` one text a node, as it reads
    after its parent. `bonus_text` is None where generation ended with a drafted token. `pieces`
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
    """Data kept of a step while generation goes on; collecting it costs no time."""

    step: Step
    seconds: dict[str, float]  # of all steps so far
    pieces: list[tuple[str, int]] = field(default_factory=list)  # of text, with its token's depth


def record(
    engine: Engine,
    prompt: Prompt,
    on_text: Callable[[str], object] = lambda text: None,
    **options: Unpack[CallOptions],
) -> Trace:
    """Generates as `Engine.generate` does, and returns the trace; `on_text` gets the text in pieces
    as they come.

    Raises what `Engine.generate` raises.
    """
    observed = engine.observed(lambda proposer: proposer)
    call = observed.prepare(prompt, **options)
    answering = observed.answering(call)
    raw: list[_Raw] = []
    places: list[tuple[_Raw, int]] = []  # of each token: its step and its depth

    def take_text() -> None:
        """Gives each piece of text to the step of the token that completed it."""
        for token, text in call.text.take_pieces():
            of_step, depth = places[token]
            of_step.pieces.append((text, depth))
            on_text(text)

    with closing(answering):
        while (step := answering.next_step()) is not None:
            assert step.stats is not None
            kept = _Raw(replace(step, features=None, verified=None), dict(step.stats.timings))
            raw.append(kept)
            places += [(kept, depth) for depth in step.depths]
            take_text()
    take_text()
    assert answering.result is not None, "it goes on"
    codec = engine.tokenizer
    steps = _traced(codec, raw)
    return Trace(codec.spelled(call.prompt), engine.drafter, steps, answering.result)


def _traced(codec: Codec, raw: Sequence[_Raw]) -> tuple[TracedStep, ...]:
    """Returns the steps with the texts of their trees, and each with its own seconds."""
    before = dict.fromkeys(PHASES, 0.0)
    steps = []
    for each in raw:
        step, tree = each.step, each.step.tree
        seconds = {phase: each.seconds[phase] - before[phase] for phase in PHASES}
        before = each.seconds
        traced = TracedStep(tuple(step.tokens), step.num_accepted, seconds, tuple(each.pieces))
        if tree is not None:
            path = whole_path(tree, step)
            texts, bonus = node_texts(codec, tree, path, step)
            traced = replace(
                traced, tree=tree, path=tuple(path), node_texts=tuple(texts), bonus_text=bonus
            )
        steps.append(traced)
    return tuple(steps)


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
    """Returns the text of each node and of the bonus, each as it reads after the text before it.

    The bonus is None if the step has none.
    """
    tokens = tree.token_N
    paths = [tree.path(node) for node in range(tree.num_nodes)]
    texts = [token_text(codec, tokens[each[:-1]].tolist(), int(tokens[each[-1]])) for each in paths]
    if step.num_accepted == len(step.tokens):
        return texts, None
    return texts, token_text(codec, tokens[list(path)].tolist(), step.tokens[-1])


def token_text(codec: Codec, before: list[int], token: int) -> str:
    """Returns a token's text after other tokens, or its name if it adds none, as control tokens do;
    never nothing."""
    added = codec.decode([*before, token])[len(codec.decode(before)) :]
    return added or codec.spelled([token]) or f"token {token}"
