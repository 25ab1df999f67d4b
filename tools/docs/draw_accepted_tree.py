"""Draws one tree of a real generation: the step with the most accepted tokens, as SVG.

python -m tools.docs.draw_accepted_tree --bundle BUNDLE --out tree.svg "Why is the sky blue?"
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import spec_runtime
from spec_runtime.bundle import manifest as bundles
from spec_runtime.errors import UserError
from spec_runtime.files.writing import write_atomically
from spec_runtime.trace import record
from spec_runtime.trees.budget import Budget
from spec_runtime.trees.drawing import accepted_tree_svg
from tools.figures import command_line, run


def drawn(trace: record.Trace) -> str:
    """Returns the SVG of the first of the steps with the most accepted tokens.

    Raises UserError if no step accepted a drafted token and went on with the target's own.
    """
    whole = [step for step in trace.steps if step.num_accepted and step.bonus_text is not None]
    if not whole:
        raise UserError("got no step with an accepted token; give another prompt, or more tokens")
    step = max(whole, key=lambda each: each.num_accepted)
    assert step.tree is not None
    assert step.bonus_text is not None
    title = (
        f"One step of {trace.drafter}: {step.tree.num_nodes - 1} nodes drafted, "
        f"{step.num_accepted} accepted, {len(step.tokens)} tokens committed"
    )
    return accepted_tree_svg(step.tree, step.path, step.node_texts, step.bonus_text, title)


def main(words: Sequence[str] | None = None) -> None:
    parser = command_line(__doc__, "--bundle", "--drafter", "--max-new-tokens", "--threads")
    parser.add_argument("prompt")
    parser.add_argument("--out", type=Path, required=True, help="the SVG file to write")
    parser.add_argument("--nodes", type=int, help="of a tree, root included; else the bundle's")
    args = parser.parse_args(words)
    engine = spec_runtime.load(
        args.bundle or bundles.find(), args.drafter, threads=args.threads, profile=False
    )
    engine = engine if args.nodes is None else engine.with_budget(Budget(args.nodes))
    trace = record.record(engine, args.prompt, max_new_tokens=args.max_new_tokens)
    write_atomically(args.out, drawn(trace))


if __name__ == "__main__":
    run(main)
