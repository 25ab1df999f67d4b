#!/usr/bin/env python3
"""Says what share of answer tokens a draft vocabulary holds, by the text it was counted on.

    python tools/vocabulary_coverage.py --count DATA.jsonl … --measure NAME=DATA.jsonl …
        [--more DATA.jsonl …] [--sizes 8192 10240 16384] [--prompt-weights 0 0.1 1]
        [--target MODEL] [--json OUT]

The vocabularies are the most frequent tokens of the answers in `--count` (what `train` takes), of
these with their prompts at each weight, and the same with the rows of `--more` too. A drafter
cannot guess a token outside its vocabulary, so one minus the share bounds what it can accept.
Measure on files that are not counted: coverage of counted rows is too good.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from spec_export import target
from spec_export.training import data
from spec_runtime.cli.options import write_figures
from spec_runtime.files.writing import require_writable

MAX_LENGTH = 4096


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=Path, nargs="+", required=True)
    parser.add_argument("--more", type=Path, nargs="*", default=[])
    parser.add_argument("--measure", nargs="+", required=True, metavar="NAME=FILE")
    parser.add_argument("--sizes", type=int, nargs="+", default=(8192, 10240, 16384))
    parser.add_argument("--prompt-weights", type=float, nargs="+", default=(0.0, 0.1, 1.0))
    parser.add_argument("--target", help="default: the demo")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.json:
        require_writable(arguments.json)
    tokenizer = target.load_tokenizer(target.resolve(arguments.target))
    size = len(tokenizer)
    measured = {
        name: data.count_tokens(data.read(Path(path), tokenizer, MAX_LENGTH), size)
        for name, _, path in (entry.partition("=") for entry in arguments.measure)
    }
    figures = []
    texts = {"counted": arguments.count}
    if arguments.more:
        texts["counted and more"] = [*arguments.count, *arguments.more]
    for text, paths in texts.items():
        examples = data.read(paths, tokenizer, MAX_LENGTH)
        for weight in arguments.prompt_weights:
            counts_V = data.count_tokens(examples, size, weight)
            for row in coverage(counts_V, measured, arguments.sizes, tokenizer):
                figures.append({"text": text, "prompt_weight": weight, **row})
    for row in figures:
        shares = "  ".join(f"{name} {row[name]:.2%}" for name in measured)
        print(f"{row['text']:17} prompts x {row['prompt_weight']:<4} {row['size']:6}  {shares}")
    if arguments.json:
        write_figures(arguments.json, {"coverage": figures})


def coverage(
    counts_V: np.ndarray, measured: dict[str, np.ndarray], sizes: Sequence[int], tokenizer: Any
) -> list[dict[str, Any]]:
    """Returns, for each size, the share of each measured text's tokens inside the vocabulary."""
    rows = []
    for size in sizes:
        ids = data.most_frequent_tokens(counts_V, size, tokenizer.all_special_ids)
        shares = {name: float(m_V[ids].sum() / m_V.sum()) for name, m_V in measured.items()}
        rows.append({"size": size, **shares})
    return rows


if __name__ == "__main__":
    main()
