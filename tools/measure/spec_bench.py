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
from spec_runtime.loop.stats import Stats, ratio
from spec_runtime.measure import bench
from spec_runtime.measure.prompts import BenchPrompt, read_prompts
from tools.figures import asked, command_line, manifest_of, markdown, parse, run, write
from tools.measure.rivals.race import Journal

WARM_UP_TOKENS = 8
Counts = Counter[str]  # what `counted` gives
COLUMNS = (
    *("plain_tokens_per_second", "tokens_per_second", "speedup", "speedup_end_to_end"),
    *("speedup_of_means", "accepted_length", "identical"),
)


def main(words: Sequence[str] | None = None) -> None:
    """Decodes what is left to decode, writes --json and prints a table."""
    flags = (
        *("--bundle", "--drafter", "--prompts", "--per-category", "--max-new-tokens"),
        *("--no-profile", "--threads", "--json"),
    )
    parser = command_line(__doc__, *flags, required=("--json",), per_category=None)
    found = measure(parse(parser, words))
    cells = [
        [name, f"{each['prompts']}", *(f"{each[column]:.3g}" for column in COLUMNS)]
        for name, each in {**found["categories"], "all": found["overall"]}.items()
    ]
    print(markdown(["subset", "questions", *COLUMNS], cells))
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
        journal.add({**row, "counts": counted(report), "divergences": divergences})
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
    """Returns the figures of some questions: those of `figures`, and speed-ups with the
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


def counted(report: bench.BenchReport) -> Counts:
    """Returns counts and seconds of a report; plain decoding's begin with ``plain_``."""
    turns = [turn for pair in report.pairs for turn in pair.turns]
    same = sum(pair.divergence is None for pair in report.pairs)
    found: Counts = Counter(prompts=len(report.pairs), turns=len(turns), identical=same)
    ways = {"": [turn.speculative for turn in turns], "plain_": [turn.plain for turn in turns]}
    for prefix, results in ways.items():
        stats = Stats.total(result.stats for result in results)
        found[f"{prefix}tokens"] = stats.committed_tokens
        found[f"{prefix}steps"] = stats.steps
        found[f"{prefix}drafted"] = stats.drafted_tokens
        seconds: dict[str, Any] = {"decode": stats.decode_seconds, **stats.timings}
        for phase in ("prefill", "decode", "draft", "verify"):
            found[f"{prefix}{phase}_seconds"] = seconds[phase]
    return found


def figures(counts: Counts) -> dict[str, Any]:
    """Returns the ratios of counts; accepted length is tokens per verify step, bonus included."""
    speed, plain = (
        ratio(counts[f"{prefix}tokens"], counts[f"{prefix}decode_seconds"])
        for prefix in ("", "plain_")
    )
    steps = counts["steps"]
    return {
        "prompts": counts["prompts"],
        "turns": counts["turns"],
        "tokens": counts["tokens"],
        "accepted_length": ratio(counts["tokens"], steps),
        "nodes": 1 + ratio(counts["drafted"], steps),
        "draft_ms": 1000 * ratio(counts["draft_seconds"], steps),
        "verify_ms": 1000 * ratio(counts["verify_seconds"], steps),
        "plain_verify_ms": 1000 * ratio(counts["plain_verify_seconds"], counts["plain_steps"]),
        "tokens_per_second": speed,
        "plain_tokens_per_second": plain,
        "speedup": ratio(speed, plain),
        "identical": ratio(counts["identical"], counts["prompts"]),
    }


if __name__ == "__main__":
    run(main)
