#!/usr/bin/env python3
"""Decodes all of Spec-Bench plainly and with a bundle's drafter, question by question.

    python -m tools.measure.spec_bench --prompts spec_bench.jsonl --bundle DIR --json OUT
        [--limit N] [--max-new-tokens 128] [--drafter NAME] [--no-profile] [--threads N]

Both turns are asked where a question has two; the second prompt then holds the first answer of the
same way of decoding. Every question is decoded both ways, and whose turn comes first alternates.
What is decoded is kept in OUT with .parts.json in place of .json: the same command goes on behind
the last whole question. --limit keeps so many questions of each subset, MT-Bench's taken from all
of its categories.

A speed-up is the ratio of tokens a second over all questions of a subset, of decoding alone and
with the prompts' passes. Spec-Bench's own is the ratio of the means over questions, prompts' passes
included; it is given too, with the tokens counted exactly. Answers that are not identical to plain
decoding's are listed with the gap between the two tokens where they part, and whether that is a
near tie, which rounding can decide.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import spec_runtime
from spec_runtime.bundle import manifest as bundles
from spec_runtime.cli.options import write_figures
from spec_runtime.files.writing import require_writable
from spec_runtime.measure import bench, provenance
from spec_runtime.measure.prompts import BenchPrompt, read_prompts
from spec_runtime.stats import ratio
from tools.measure.decoding import Counts, Ledger, counted, figures

WARM_UP_TOKENS = 8
HEAD: tuple[str, ...] = (
    "subset",
    "questions",
    "turns",
    "plain tokens/s",
    "tokens/s",
    "speed-up",
    "end to end",
)
HEAD += ("Spec-Bench's", "accepted length", "identical")


def main(words: Sequence[str] | None = None) -> int:
    """Decodes what is left to decode, writes --json and prints a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--bundle", type=Path)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--limit", type=int, help="questions of each subset; default: all")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--drafter", help="default: the bundle's own")
    parser.add_argument("--no-profile", action="store_true", help="without what tune found")
    parser.add_argument("--threads", type=int)
    args = parser.parse_args(words)
    try:
        require_writable(args.json)
        found = measure(args)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    write_figures(args.json, found)
    print("\n".join(table(found)))
    return 0


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Decodes each question that the ledger lacks, and returns the figures of all.

    Raises ValueError if the bundle or the questions cannot be read, and if the ledger has other
    settings.
    """
    folder = args.bundle or bundles.find()
    questions = read_prompts(args.prompts, per_category=args.limit)
    engine = spec_runtime.load(folder, args.drafter, args.threads, profile=not args.no_profile)
    manifest = bundles.read(folder, verify=False).manifest
    about = {"drafter": engine.drafter, "tuned": engine.is_tuned}
    ledger = Ledger(
        args.json.with_suffix(".parts.json"),
        {
            **about,
            "questions": [question.id for question in questions],
            "max_new_tokens": args.max_new_tokens,
            "threads": args.threads,
            "files": manifest.files,
        },
    )
    decode(engine, questions, args.max_new_tokens, ledger)
    counts = ledger.counts(engine.drafter)
    return {
        "provenance": provenance.collect(
            threads=args.threads,
            prompts_file=args.prompts,
            prompts=questions,
            manifest=manifest,
        ),
        "bundle": manifest.name,
        "precision": manifest.target.precision,
        **about,
        "max_new_tokens": args.max_new_tokens,
        **summarise(questions, counts, ledger.notes),
    }


def decode(
    engine: spec_runtime.Engine,
    questions: Sequence[BenchPrompt],
    max_new_tokens: int,
    ledger: Ledger,
) -> None:
    """Decodes plainly and with the engine every question that the ledger lacks, one by one."""
    name = engine.drafter
    left = [(n, each) for n, each in enumerate(questions) if not ledger.has(name, _key(each))]
    if not left:
        return
    for each in (engine, engine.with_drafter("none")):  # pages in weights and buffers
        each.generate("Say something.", max_new_tokens=WARM_UP_TOKENS, reuse=False)
    for number, question in left:
        # Numbers begin with 1, since the engines are warm already.
        (report,) = bench.run([engine], [question], max_new_tokens, num_before=number + 1)
        note = {"skipped": report.skipped, "divergences": []}
        for pair in report.pairs:
            if pair.divergence is not None:
                turn, parted = pair.divergence
                note["divergences"].append(
                    {
                        "turn": turn,
                        "position": parted.position,
                        "plain_id": parted.plain_id,
                        "id": parted.id,
                        "gap": parted.gap,
                        "near_tie": parted.is_near_tie,
                    }
                )
        ledger.add({name: counted(report)}, _key(question), note if any(note.values()) else None)
        print(f"{number + 1} of {len(questions)} questions", file=sys.stderr, flush=True)


def summarise(
    questions: Sequence[BenchPrompt], counts: Mapping[str, Counts], notes: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns ``overall`` and ``categories``, each as `_figures` gives, and all divergences."""
    by_category: dict[str, list[Counts]] = {}
    for each in questions:
        by_category.setdefault(each.category, []).append(counts[_key(each)])
    listed: dict[str, list[dict[str, Any]]] = {"divergences": [], "skipped": []}
    for each in questions:
        for kind, found in notes.get(_key(each), {}).items():
            listed[kind] += [{"prompt": each.id, "category": each.category, **x} for x in found]
    ties = Counter(each["near_tie"] for each in listed["divergences"])
    return {
        "overall": _figures([each for group in by_category.values() for each in group]),
        "categories": {name: _figures(group) for name, group in by_category.items()},
        "near_ties": ties[True],
        "wider": ties[False],
        **listed,
    }


def _figures(counts: Sequence[Counts]) -> dict[str, Any]:
    """Returns the figures of some questions: those of `decoding.figures`, and speed-ups with the
    prompts' passes, over all tokens and as Spec-Bench averages them."""
    whole: Counts = sum(counts, Counter())
    asked = [each for each in counts if each["turns"]]
    speed, plain = ([_whole_speed(each, prefix) for each in asked] for prefix in ("", "plain_"))
    end_to_end = ratio(_whole_speed(whole, ""), _whole_speed(whole, "plain_"))
    means = ratio(statistics.mean(speed), statistics.mean(plain)) if asked else 0.0
    return {**figures(whole), "speedup_end_to_end": end_to_end, "speedup_of_means": means}


def _whole_speed(counts: Counts, prefix: str) -> float:
    """Returns tokens a second with the prompts' passes, which give each answer's first token."""
    seconds = counts[f"{prefix}prefill_seconds"] + counts[f"{prefix}decode_seconds"]
    return ratio(counts[f"{prefix}tokens"] + counts["turns"], seconds)


def _key(question: BenchPrompt) -> str:
    return str(question.id)


def table(found: Mapping[str, Any]) -> list[str]:
    """Returns the lines of a Markdown table, and one about what is not identical."""
    lines = ["| " + " | ".join(HEAD) + " |", "|" + "---|" * len(HEAD)]
    for name, each in {**found["categories"], "all": found["overall"]}.items():
        cells = [name, str(each["prompts"]), str(each["turns"])]
        cells += [f"{each[key]:.1f}" for key in ("plain_tokens_per_second", "tokens_per_second")]
        keys = ("speedup", "speedup_end_to_end", "speedup_of_means", "accepted_length")
        cells += [f"{each[key]:.2f}" for key in keys]
        lines.append("| " + " | ".join([*cells, f"{each['identical']:.1%}"]) + " |")
    parted = f"{found['near_ties']} near ties, {found['wider']} wider"
    return [*lines, f"not identical: {len(found['divergences'])} ({parted})"]


if __name__ == "__main__":
    sys.exit(main())
