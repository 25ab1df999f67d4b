"""Draws one tree of a real generation: the step with the most accepted tokens, as SVG.

python -m tools.docs.draw_accepted_tree --bundle BUNDLE --out tree.svg "Why is the sky blue?"
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import spec_runtime
from spec_runtime.bundle import manifest as bundles
from spec_runtime.errors import UserError
from spec_runtime.files.writing import require_writable, write_atomically
from spec_runtime.loop.proposer import Drafting, Proposer
from spec_runtime.loop.step import Step
from spec_runtime.proposers.wrapper import ProposerWrapper
from spec_runtime.trace.record import node_texts
from spec_runtime.trees.budget import Budget
from spec_runtime.trees.drawing import accepted_tree_svg
from spec_runtime.trees.tree import TokenTree
from tools.figures import command_line, run


class StepRecorder(ProposerWrapper):
    """Notes the tree of each step and what became of it."""

    def __init__(self, proposer: Proposer) -> None:
        super().__init__(proposer)
        self.steps: list[tuple[TokenTree, Step]] = []
        self._tree = TokenTree.root(0)

    def drafting(self, token: int, budget: Budget) -> Drafting:
        self._tree = yield from super().drafting(token, budget)
        return self._tree

    def commit(self, step: Step) -> None:
        self.steps.append((self._tree, step))
        super().commit(step)


def best_step(steps: Sequence[tuple[TokenTree, Step]]) -> tuple[TokenTree, Step]:
    """Returns the first of the steps with the most accepted tokens that were not cut short.

    Raises UserError if none of them accepted a drafted token.
    """
    whole = [(tree, step) for tree, step in steps if step.num_accepted < len(step.tokens)]
    tree, step = max(whole, key=lambda each: each[1].num_accepted, default=(None, None))
    if tree is None or step is None or step.num_accepted == 0:
        raise UserError("got no step with an accepted token; give another prompt, or more tokens")
    return tree, step


def drawn(engine: spec_runtime.Engine, prompt: str, max_new_tokens: int, nodes: int | None) -> str:
    """Returns the SVG of the best step of an answer to `prompt`."""
    recorder: list[StepRecorder] = []

    def record(proposer: Proposer) -> Proposer:
        recorder.append(StepRecorder(proposer))
        return recorder[0]

    watched = engine.observed(record, None if nodes is None else Budget(nodes))
    watched.generate(prompt, max_new_tokens=max_new_tokens)
    tree, step = best_step(recorder[0].steps)
    texts, bonus = node_texts(engine.tokenizer, tree, step.path, step)
    assert bonus is not None, "best_step leaves steps out that were cut short"
    title = (
        f"One step of {engine.drafter}: {tree.num_nodes - 1} nodes drafted, "
        f"{step.num_accepted} accepted, {len(step.tokens)} tokens committed"
    )
    return accepted_tree_svg(tree, step.path, texts, bonus, title)


def main(words: Sequence[str] | None = None) -> None:
    parser = command_line(__doc__, "--bundle", "--drafter", "--max-new-tokens", "--threads")
    parser.add_argument("prompt")
    parser.add_argument("--out", type=Path, required=True, help="the SVG file to write")
    parser.add_argument("--lookup", action=argparse.BooleanOptionalAction, default=None)
    parser.add_argument("--nodes", type=int, help="of a tree, root included; else the bundle's")
    arguments = parser.parse_args(words)
    require_writable(arguments.out)
    engine = spec_runtime.load(
        arguments.bundle or bundles.find(),
        arguments.drafter,
        threads=arguments.threads,
        lookup=arguments.lookup,
        profile=False,
    )
    svg = drawn(engine, arguments.prompt, arguments.max_new_tokens, arguments.nodes)
    write_atomically(arguments.out, svg)
    print(arguments.out, file=sys.stderr)


if __name__ == "__main__":
    run(main)
