"""Decodes all of Spec-Bench plainly and with a bundle's drafter, question by question.

    python -m tools.measure.spec_bench --prompts spec_bench.jsonl --bundle DIR --json OUT

Both turns are asked where a question has two; the second prompt then holds the first answer of the
same way of decoding. Every question is decoded both ways, and whose turn comes first alternates.
What is decoded is kept in OUT with .rows.jsonl in place of .json: the same command goes on after
the last whole question. --per-category keeps some questions of each subset, MT-Bench's taken from
all of its categories.

A speed-up is the ratio of tokens a second over all questions of a subset, of decoding only and
with the prompts' passes. Spec-Bench's own is the ratio of the means over questions, prompts' passes
included; it is given too, with the tokens counted exactly. Answers that are not identical to plain
decoding's are listed with the gap between the two tokens where they part, and whether that is a
near tie, which rounding can decide.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import spec_runtime
from spec_runtime.bundle import manifest as bundles
from spec_runtime.loop.stats import ratio
from spec_runtime.measure import bench
from spec_runtime.measure.prompts import BenchPrompt, read_prompts
from tools.docs.render import shown
from tools.docs.rows import of_subsets
from tools.figures import asked, command_line, manifest_of, parse, run, write
from tools.measure.rivals.race import Journal

WARM_UP_TOKENS = 8
Counts = Counter[str]  # of KEPT and "identical"
KEPT = ["prompts", "turns", "steps", "tokens", "prefill_seconds", "decode_seconds"]
KEPT += ["plain_tokens", "plain_prefill_seconds", "plain_decode_seconds"]


def main(words: Sequence[str] | None = None) -> None:
    """Decodes what is left to decode, writes --json and prints a table."""
    flags = (
        *("--bundle", "--drafter", "--prompts", "--per-category", "--max-new-tokens"),
        *("--no-profile", "--threads", "--json"),
    )
    parser = command_line(__doc__, *flags, required=("--json",), per_category=None)
    found = measure(parse(parser, words))
    print(shown("spec_bench", of_subsets(found)))
    parted = f"{found['near_ties']} near ties, {found['wider']} wider"
    print(f"not identical: {len(found['divergences'])} ({parted})")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Decodes each question that the journal lacks; writes and returns the figures of all.

    Raises UserError if the bundle or the questions cannot be read, and if the journal has other
    settings.
    """
    folder = args.bundle or bundles.find()
    questions = read_prompts(args.prompts, per_category=args.per_category)
    engine = spec_runtime.load(folder, args.drafter, args.threads, profile=not args.no_profile)
    manifest = manifest_of(folder)
    about = {"drafter": engine.drafter, "tuned": engine.is_tuned}
    settings = {
        **about,
        "questions": [question.id for question in questions],
        "max_new_tokens": args.max_new_tokens,
        "threads": args.threads,
        "files": manifest.files,
    }
    journal = Journal(args.json.with_suffix(".rows.jsonl"), settings)
    decode(engine, questions, args.max_new_tokens, journal)
    found = summarise(questions, journal.rows)
    whole = {**about, "max_new_tokens": args.max_new_tokens, **found}
    return write(args.json, whole, **asked(args), prompts=questions, manifest=manifest)


def decode(
    engine: spec_runtime.Engine,
    questions: Sequence[BenchPrompt],
    max_new_tokens: int,
    journal: Journal,
) -> None:
    """Decodes plainly and with the engine every question that the journal lacks, one by one."""
    done = {row["question"] for row in journal.rows}
    left = [(n, each) for n, each in enumerate(questions) if each.id not in done]
    for each in (engine, engine.with_drafter("none")) if left else ():  # pages in weights, buffers
        each.generate("Say something.", max_new_tokens=WARM_UP_TOKENS, reuse=False)
    for number, question in left:
        # Numbers begin with 1, since the engines are warm already.
        (report,) = bench.run([engine], [question], max_new_tokens, num_before=number + 1)
        divergences = [
            {"turn": turn, "near_tie": parted.is_near_tie, **dataclasses.asdict(parted)}
            for pair in report.pairs
            if pair.divergence is not None
            for turn, parted in [pair.divergence]
        ]
        row = {"question": question.id, "category": question.category, "skipped": report.skipped}
        found = bench.summary(report.pairs)
        counts = {name: found[name] for name in KEPT}
        counts["identical"] = found["identical"] * found["prompts"]
        journal.add({**row, "counts": counts, "divergences": divergences})
        print(f"{number + 1} of {len(questions)} questions", file=sys.stderr, flush=True)


def summarise(questions: Sequence[BenchPrompt], rows: Sequence[Mapping[str, Any]]) -> Any:
    """Returns ``overall`` and ``categories``, each as `_figures` gives, and all divergences."""
    by_id = {row["question"]: row for row in rows}
    found = [by_id[each.id] for each in questions]
    by_category: dict[str, list[Counts]] = {}
    for row in found:
        by_category.setdefault(row["category"], []).append(Counter(row["counts"]))
    listed = {
        kind: [{"category": row["category"], **each} for row in found for each in row[kind]]
        for kind in ("divergences", "skipped")
    }
    ties = Counter(each["near_tie"] for each in listed["divergences"])
    return {
        "overall": _figures([each for group in by_category.values() for each in group]),
        "categories": {name: _figures(group) for name, group in by_category.items()},
        "near_ties": ties[True],
        "wider": ties[False],
        **listed,
    }


def _figures(counts: Sequence[Counts]) -> dict[str, Any]:
    """Returns the figures of some questions; speed-ups are those of decoding, those with the
    prompts' passes, and those as Spec-Bench averages them. Accepted length is tokens per verify
    step, bonus included."""
    whole: Counts = sum(counts, Counter())
    speed, plain = (
        ratio(whole[f"{way}tokens"], whole[f"{way}decode_seconds"]) for way in ("", "plain_")
    )
    means = [
        statistics.mean(_whole_speed(each, way) for each in counts if each["turns"])
        for way in ("", "plain_")
        if whole["turns"]
    ]
    return {
        "prompts": whole["prompts"],
        "turns": whole["turns"],
        "tokens": whole["tokens"],
        "accepted_length": ratio(whole["tokens"], whole["steps"]),
        "tokens_per_second": speed,
        "plain_tokens_per_second": plain,
        "speedup": ratio(speed, plain),
        "speedup_end_to_end": ratio(_whole_speed(whole, ""), _whole_speed(whole, "plain_")),
        "speedup_of_means": ratio(*means) if means else 0.0,
        "identical": ratio(whole["identical"], whole["prompts"]),
    }


def _whole_speed(counts: Counts, way: str) -> float:
    """Returns tokens a second with the prompts' passes, which give each answer's first token."""
    seconds = counts[f"{way}prefill_seconds"] + counts[f"{way}decode_seconds"]
    return ratio(counts[f"{way}tokens"] + counts["turns"], seconds)


if __name__ == "__main__":
    run(main)
