#!/usr/bin/env python3
"""Writes measured figures from JSON into the marked blocks of README.md and docs/.

usage: python tools/docs/render.py [--check]

A block is everything between `<!-- figures: NAME -->` and `<!-- /figures -->`; it may be a table or
one number in a sentence, in which case it must not begin a line (Markdown would end the paragraph
there). NAME is one of

    FILE PATH FORMAT    one value: `bench-fp32 overall.speedup .2f` is results/bench-fp32.json's
                        overall.speedup with two decimals
    TABLE [ARGUMENT]    one of the tables of this file, such as `sweep int8`
    section NAME        a heading, its table and where the figures come from; nothing at all as
                        long as the figures have not been measured

With --check nothing is written: the exit code is 1 if a block is not what its JSON says. Figures
are never typed by hand, so that a new measurement needs this command and no editing.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "recipes/smollm2-135m/results"
BLOCK = re.compile(
    r"(?P<begin><!-- figures: (?P<name>[^>]+?) -->)(?P<body>.*?)(?P<end><!-- /figures -->)",
    re.DOTALL,
)
SUBSETS = ("mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag")
OPTIONS, TEMPERATURES = "ablation-parallelspec-options", "drafters-temperatures"
BY_NODES, BY_MASKS, ALIKE = "drafters-nodes", "mask-speed", "drafters-alike"
STEPS, CHECK = "steps", "check"
TRAINING_STEPS = "training-steps"
TRAINING_DATA, OVERLAP = "training-data", "training-overlap"
JOINT = ("joint-medusa2", "joint-semi-autoregressive")
SHIPPED = ROOT / "spec_export/assets/drafters/smollm2-135m-instruct"
RIVALS, SPEC_BENCH = "rivals", ("spec-bench-fp32", "spec-bench-int8")
ALONE = "drafters.parallelspec.overall.accepted_length"
SAMPLED = 'rows."temperature=1.0,rule=target_sampling".'
BEST_MODE = 'best."precision={},context={},kind=best mode".ratio'
# new measurements, which a page may be ahead of
AWAITED = (
    "lookup-fp32",
    "lookup-int8",
    CHECK,
    OPTIONS,
    TEMPERATURES,
    BY_NODES,
    BY_MASKS,
    ALIKE,
    RIVALS,
    STEPS,
    *SPEC_BENCH,
)
AWAITED += (TRAINING_STEPS, TRAINING_DATA, OVERLAP, *JOINT)
# What was aimed for: words, bound, "least" or "most" that it is, file, path of the figure; a path
# with "*" stands for the smallest figure of all that have one there.
AIMS: tuple[tuple[str, float, str, str, str], ...] = (
    ("accepted length at fp32", 3.0, "least", "bench-fp32", "overall.accepted_length"),
    ("accepted length at int8", 3.0, "least", "bench-int8", "overall.accepted_length"),
    ("the drafter alone: accepted length at fp32", 2.6, "least", "lookup-fp32", ALONE),
    ("the drafter alone: accepted length at int8", 2.6, "least", "lookup-int8", ALONE),
    ("speed-up at fp32", 1.9, "least", "bench-fp32", "overall.speedup"),
    ("speed-up at int8", 1.75, "least", "bench-int8", "overall.speedup"),
    ("speed-up of the slowest subset at fp32", 1.3, "least", "bench-fp32", "categories.*.speedup"),
    ("speed-up of the slowest subset at int8", 1.3, "least", "bench-int8", "categories.*.speedup"),
    (
        "accepted length at temperature 1, int8",
        1.6,
        "least",
        "acceptance-int8",
        SAMPLED + "accepted length",
    ),
    ("speed-up at temperature 1, int8", 1.0, "least", "acceptance-int8", SAMPLED + "speedup"),
    *(
        (
            f"our best mode over the best other engine's: {precision}, {shape} prompts",
            bound,
            "least",
            RIVALS,
            BEST_MODE.format(precision, shape),
        )
        for precision, bound in (("fp32", 1.6), ("int8", 2.0), ("int4", 1.1))
        for shape in ("short", "long")
    ),
    *(
        (
            f"a pass over {nodes} nodes by one over a node: {precision}, {context} tokens before",
            bound,
            "most",
            STEPS,
            f'passes.{precision}."context={context},nodes={nodes}".over_one_node',
        )
        for precision, context, nodes, bound in (
            ("fp32", 200, 8, 1.25),
            ("int8", 200, 8, 1.25),
            ("int8", 200, 16, 1.5),
            ("int8", 1500, 8, 1.35),
        )
    ),
    (
        "a pass over a node, 1500 tokens before by 200: int8",
        1.35,
        "most",
        STEPS,
        'passes.int8."context=1500,nodes=1".over_first',
    ),
)
LEFT_OUT = "\n\n"  # what stands for a section whose figures are not there
NOT_MEASURED = "\n\n*Not measured yet.*\n\n"
CONTENDERS = {
    "plain": "plain decoding",
    "bundle": "the bundle's trees",
    "tuned": "chosen by `tune`",
}


class FigureError(ValueError):
    """A block that cannot be rendered: what was asked, what is there, what to do."""


# ---- reading the JSON files


@cache
def load(name: str) -> Any:
    """Returns the parsed results/NAME.json, or docs/deploy/NAME.json for figures of a build."""
    for folder in (RESULTS, ROOT / "docs/deploy"):
        file = folder / f"{name}.json"
        if file.is_file():
            return json.loads(file.read_text(encoding="utf-8"))
    known = ", ".join(sorted(file.stem for file in RESULTS.glob("*.json")))
    raise FigureError(f"got results file {name!r}, expected one of {known}")


def measured(name: str) -> bool:
    """Says whether the file is there; only the files of `AWAITED` may be absent."""
    return name not in AWAITED or (RESULTS / f"{name}.json").is_file()


def value(data: Any, path: str, file: str) -> Any:
    """Follows `path` ("overall.speedup", "rows[0].speedup") through parsed JSON.

    Keys that themselves hold a dot or a blank are quoted: `contenders."4 nodes".nodes`. The row of
    a list that has these values is `rows."temperature=0.7,rule=plain"`.
    """
    for part in re.findall(r'"[^"]+"|[^.\[\]]+', path):
        part = part.strip('"')
        if isinstance(data, list) and part.isdecimal() and int(part) < len(data):
            data = data[int(part)]
        elif isinstance(data, list) and len(rows := _rows_with(data, part)) == 1:
            data = rows[0]
        elif isinstance(data, dict) and part in data:
            data = data[part]
        else:
            there = ", ".join(data) if isinstance(data, dict) else type(data).__name__
            raise FigureError(
                f"{file}.json has no {path!r}: at {part!r} there is {there}; measure the file anew "
                "or change the name in the document"
            )
    return data


def _rows_with(rows: list[Any], wanted: str) -> list[Any]:
    """Returns the rows that have all of `wanted`, "key=value,key=value"."""
    pairs = [pair.partition("=")[::2] for pair in wanted.split(",")]
    return [row for row in rows if all(str(row.get(key)) == value for key, value in pairs)]


def provenance(name: str, data: Any) -> dict[str, Any]:
    """Returns where a file's figures come from, as far as recorded (see measure/provenance.py)."""
    found = data.get("provenance", data) if isinstance(data, dict) else {}
    command = found.get("command")
    if isinstance(command, list):
        command = " ".join(map(str, command))
    return {
        "commit": found.get("commit") or found.get("git_commit"),
        "date": found.get("date"),
        "cpu": found.get("cpu"),
        "command": command,
        "note": found.get("note"),
    }


# ---- pieces of Markdown


def table(head: list[str], rows: list[list[str]], left: int = 1) -> str:
    """Returns a Markdown table whose first `left` columns are text and all others numbers."""
    rule = ["---" if column < left else "---:" for column in range(len(head))]
    lines = ["| " + " | ".join(row) + " |" for row in [head, rule, *rows]]
    return "\n\n" + "\n".join(lines) + "\n\n"


def number(got: float | None, form: str) -> str:
    return "" if got is None else format(got, form)


def spread(found: dict[str, float], form: str = ".2f") -> str:
    """Returns a median with its range: "1.52 (1.48 to 1.60)"."""
    median, least, greatest = (format(found[key], form) for key in ("median", "least", "greatest"))
    return f"{median} ({least} to {greatest})"


def millions(parameters: int | None) -> str:
    return "" if not parameters else f"{parameters / 1e6:.1f} M"


# ---- the tables


def readme(_: str) -> str:
    """Six rows, one a subset: speed and accepted length at fp32 and int8."""
    head = ["Spec-Bench subset"]
    rows: dict[str, list[str]] = {subset: [f"`{subset}`"] for subset in SUBSETS}
    for precision in ("fp32", "int8"):
        head += [f"{precision}: tokens/s", "speed-up", "accepted length"]
        categories = value(load(f"bench-{precision}"), "categories", f"bench-{precision}")
        for subset in SUBSETS:
            each = value(categories, subset, f"bench-{precision}")
            rows[subset] += [
                f"{each['plain_tokens_per_second']:.0f} → {each['tokens_per_second']:.0f}",
                f"{headline(each, precision):.2f}",
                f"{each['accepted_length']:.2f}",
            ]
    return table(head, list(rows.values()))


def headline(summary: dict[str, Any], precision: str) -> float:
    """Returns the speed-up of decoding alone: the ratio of speeds in tokens per second.

    Older files hold a ratio of total times as `speedup`, which at a reduced precision compares
    texts of different lengths.
    """
    if "decode_time_ratio" in summary or precision in ("fp32", "fp16"):
        return summary["speedup"]
    return summary["tokens_per_second"] / summary["plain_tokens_per_second"]


def bench(precision: str) -> str:
    """Every subset and all prompts together, with what a step costs."""
    file = f"bench-{precision}"
    data = load(file)
    rows = []
    overall = value(data, "overall", file)
    ends = [key for key in ("speedup_end_to_end",) if key in overall]
    for name, each in {"all prompts": overall, **data["categories"]}.items():
        rows.append(
            [
                name if name == "all prompts" else f"`{name}`",
                f"{each['plain_tokens_per_second']:.1f}",
                f"{each['tokens_per_second']:.1f}",
                f"{headline(each, precision):.2f}",
                *(f"{each[key]:.2f}" for key in ends),
                f"{each['accepted_length']:.2f}",
                f"{each['nodes_per_step']:.1f}",
                f"{each['plain_verify_ms']:.1f}",
                f"{each['verify_ms']:.1f}",
                f"{each['draft_ms']:.1f}",
                f"{each['identical']:.0%}",
            ]
        )
    head = ["prompts", "plain tokens/s", "tokens/s", "speed-up, decoding"]
    head += ["speed-up, end to end"] * len(ends)
    head += ["accepted length", "drafted nodes", "plain pass ms", "verify ms", "draft ms"]
    return table([*head, "identical"], rows)


def aims(_: str) -> str:
    """What was aimed for beside what was measured."""
    rows = []
    for words, bound, kind, file, path in AIMS:
        row = [words, f"at {kind} {bound:g}"]
        if measured(file):
            got = least(load(file), path, file)
            is_met = got >= bound if kind == "least" else got <= bound
            row += [f"{got:.2f}", "yes" if is_met else "no"]
        else:
            row += ["not measured yet", ""]
        rows.append(row)
    return table(["", "aim", "measured", "met"], rows)


def least(data: Any, path: str, file: str) -> float:
    """Returns the value at `path`, or the smallest of all that a "*" in it stands for."""
    above, star, below = path.partition("*")
    if not star:
        return value(data, path, file)
    many = value(data, above.rstrip("."), file)
    return min(value(each, below.lstrip("."), file) for each in many.values())


def end_to_end(precision: str) -> str:
    """The speed-up with the prompt's pass included, as one number."""
    overall = value(load(f"bench-{precision}"), "overall", f"bench-{precision}")
    if "speedup_end_to_end" in overall:
        return f"{overall['speedup_end_to_end']:.2f}"
    # Files of older versions lack plain decoding's prefill; the drafter adds a few per cent to it.
    prefill = overall["prefill_seconds"]
    plain = overall["plain_tokens"] / overall["plain_tokens_per_second"]
    speculative = overall["tokens"] / overall["tokens_per_second"]
    return f"{(prefill + plain) / (prefill + speculative):.2f}"


def drafters(_: str) -> str:
    """All drafters, trained alike and decoded in one run."""
    trained, decoded = load("drafters-training"), load("drafters-fp32")
    rows = []
    for name, each in value(decoded, "drafters", "drafters-fp32").items():
        overall = each["overall"]
        held_out = trained.get(name, {}).get("accepted_length")
        rows.append(
            [
                f"[`{name}`](../drafters/{name}.md)",
                millions(each.get("parameters")),
                number(held_out, ".2f"),
                f"{overall['accepted_length']:.2f}",
                f"{overall['nodes_per_step']:.1f}",
                f"{overall['draft_ms']:.1f}",
                f"{overall['verify_ms']:.1f}",
                f"{overall['speedup']:.2f}",
                f"{overall['identical']:.0%}",
            ]
        )
    head = ["drafter", "parameters", "held out", "accepted length", "drafted nodes", "draft ms"]
    return table([*head, "verify ms", "speed-up", "identical"], rows)


def drafter(name: str) -> str:
    """One drafter by subset: accepted length, draft time and speed-up."""
    decoded = value(load("drafters-fp32"), f"drafters.{name}", "drafters-fp32")
    rows = []
    for subset, each in {"all prompts": decoded["overall"], **decoded["categories"]}.items():
        rows.append(
            [
                subset if subset == "all prompts" else f"`{subset}`",
                f"{each['accepted_length']:.2f}",
                f"{each['nodes_per_step']:.1f}",
                f"{each['draft_ms']:.1f}",
                f"{each['verify_ms']:.1f}",
                f"{each['speedup']:.2f}",
            ]
        )
    head = ["prompts", "accepted length", "drafted nodes", "draft ms", "verify ms", "speed-up"]
    return table(head, rows)


def accuracy(name: str) -> str:
    """How often the target's token is a drafter's best guess, or among its best five."""
    trained = value(load("drafters-training"), name, "drafters-training")
    count = sum(key.startswith("top1_") for key in trained)
    rows = [
        [label, *(f"{trained[f'{key}_{k}']:.2f}" for k in range(count))]
        for label, key in (("best guess", "top1"), ("among five", "top5"))
    ]
    return table(["on held-out answers", *(f"guess {k + 1}" for k in range(count))], rows)


def acceptance(_: str) -> str:
    """Acceptance rules above temperature 0, a row a rule."""
    rows_by_rule: dict[str, list[str]] = {}
    data = value(load("acceptance-int8"), "rows", "acceptance-int8")
    temperatures = list(dict.fromkeys(row["temperature"] for row in data))
    for row in data:
        rule = row["rule"].replace("plain", "plain decoding").replace("_", " ")
        rows_by_rule.setdefault(rule.replace("typical ", "typical, ε "), []).extend(
            [
                f"{row['accepted length']:.2f}",
                f"{row['speedup']:.2f}",
                f"{row['log p a token']:.2f}",
            ]
        )
    head = ["acceptance"]
    for temperature in temperatures:
        head += [f"T = {temperature}: accepted length", "speed-up", "log p"]
    return table(head, [[rule, *cells] for rule, cells in rows_by_rule.items()])


def sweep(precision: str) -> str:
    """Tree budgets beside the one that `tune` chose."""
    rows = []
    for name, each in value(load(f"sweep-{precision}"), "contenders", "sweep").items():
        speedup = each["speedup"]
        subset = min(SUBSETS, key=lambda key: speedup[key]["median"])
        rows.append(
            [
                CONTENDERS.get(name, name.replace(">=", "≥")),
                f"{each['nodes']:.1f}",
                f"{each['accepted_length']:.2f}",
                spread(speedup["all"]),
                f"{spread(speedup[subset])}, `{subset}`",
            ]
        )
    head = ["trees", "nodes", "accepted length", "speed-up: median (range)", "slowest subset"]
    return table(head, rows)


def threads(precision: str) -> str:
    """ONNX Runtime's thread settings beside each other, and beside a busy process."""
    rows = []
    for each in value(load(f"threads-{precision}"), "rows", "threads"):
        cells = [f"{spread(each[mode], '.0f')}" for mode in ("plain", "drafter")]
        rows.append([f"{each['threads']}", f"{each['neighbours']}", each["setting"], *cells])
    head = ["threads", "busy processes beside", "setting", "plain tokens/s", "with the drafter"]
    return table(head, rows)


def ablation(study: str) -> str:
    """The variants of one drafter: accuracy by guess, accepted length, parameters."""
    variants = value(load(f"ablation-{study}"), "variants", f"ablation-{study}")
    count = max(len(each["top1_K"]) for each in variants)
    rows = [
        [
            each["variant"],
            *(f"{guess:.3f}" for guess in each["top1_K"]),
            *[""] * (count - len(each["top1_K"])),
            f"{each['accepted_length']:.3f}",
            millions(each["parameters"]),
        ]
        for each in variants
    ]
    head = ["variant", *(f"guess {k + 1}" for k in range(count)), "accepted length", "parameters"]
    return table(head, rows)


def ablation_lengths(study: str) -> str:
    """The variants of one drafter: simulated accepted lengths, blank where not measured."""
    file = f"ablation-{study}"
    variants = value(load(file), "variants", file)
    names = list(dict.fromkeys(name for each in variants for name in each["lengths"]))
    rows = [
        [each["variant"], *(number(each["lengths"].get(name), ".3f") for name in names)]
        for each in variants
    ]
    return table(["variant", *names], rows)


# ---- sections that a page has once they are measured


def section(name: str) -> str:
    """One of `SECTIONS`, or nothing where its JSON file is not there or lacks its figures."""
    if name not in SECTIONS:
        raise FigureError(f"got section {name!r}, expected one of {', '.join(SECTIONS)}")
    return SECTIONS[name]()


def framed(heading: str, words: str, body: str, file: str) -> str:
    """Returns a section: heading, words, tables or figures, and where they come from."""
    return f"\n\n## {heading}\n\n{words}\n{body}\nMeasured: {source(file)}\n\n"


def options_study() -> str:
    """ParallelSpec's options at one budget: guesses, calibration, lengths, size and speed."""
    if not measured(OPTIONS):
        return LEFT_OUT
    data = load(OPTIONS)
    variants = [each for each in value(data, "variants", OPTIONS) if "error" not in each]
    count = max(len(each["top1_K"]) for each in variants)
    sizes = list(dict.fromkeys(size for each in variants for size in each.get("decoding", ())))
    rows = []
    for each in variants:
        pairs = zip(each["top1_K"], each["top5_K"], strict=True)
        guesses = [f"{best:.2f} / {five:.2f}" for best, five in pairs]
        decoding = each.get("decoding", {})
        errors = each.get("ece_K")
        lengths = [decoding.get(size, {}).get("accepted_length") for size in sizes]
        rows.append(
            [
                each["variant"],
                *guesses,
                *[""] * (count - len(guesses)),
                "" if errors is None else " ".join(f"{error:.1%}" for error in errors),
                f"{each['accepted_length']:.2f}",
                *(number(length, ".2f") for length in lengths),
                millions(each["parameters"]),
                number(each.get("tokens_per_second"), ",.0f"),
                number(each.get("hours"), ".1f"),
            ]
        )
    head = ["variant", *(f"guess {k + 1}" for k in range(count)), "calibration error by guess"]
    head += [f"simulated, {data['nodes']} nodes", *(f"decoding, {size}" for size in sizes)]
    words = (
        f"Each variant learnt from {data['token_rows']['token_rows'] / 1e6:.3g} M token rows of "
        "the same data in one run with the same seed. A guess has the share of answers that are "
        "the best guess, and that are among the best five. *Simulated* is the accepted length on "
        "held-out answers; *decoding* that on Spec-Bench, without prompt lookup."
    )
    body = table([*head, "parameters", "training tokens/s", "hours"], rows)
    return framed("ParallelSpec: options", words, body, OPTIONS)


def masks_speed() -> str:
    """The shipped ParallelSpec with fewer masks: accepted length and speed-up by tree size."""
    if not measured(BY_MASKS):
        return LEFT_OUT
    columns = ("accepted_length", "nodes", "draft_ms", "verify_ms", "speedup")
    rows = [
        [str(row["masks"]), str(row["size"]), *(f"{row[column]:.2f}" for column in columns)]
        for row in value(load(BY_MASKS), "rows", BY_MASKS)
    ]
    head = ["masks", "trees of", "accepted length", "nodes", "draft ms", "verify ms", "speed-up"]
    words = (
        "The drafter in the package has learnt with four masks. Its first masks guess the same "
        "without the others, so that it decodes here with each number of them, without prompt "
        "lookup."
    )
    body = table(head, rows)
    return framed("ParallelSpec: what a mask is worth in speed", words, body, BY_MASKS)


def by_drafter(file: str, key: str) -> dict[str, dict[Any, dict[str, Any]]]:
    """Returns the rows of tools/measure/compare_drafters.py by drafter and by `key`."""
    found: dict[str, dict[Any, dict[str, Any]]] = {}
    for row in value(load(file), "rows", file):
        found.setdefault(row["drafter"], {})[row[key]] = row
    return found


def drafters_alike() -> str:
    """Drafters after one budget of train_drafters.py: steps, and how often a guess is
    right."""
    if not measured(ALIKE):
        return LEFT_OUT
    found = {name: each for name, each in load(ALIKE).items() if name != "provenance"}
    count = max(len(each["top1_K"]) for each in found.values())
    cells = [
        [
            f"[`{name}`](../drafters/{name}.md)",
            millions(each["parameters"]),
            f"{each['steps']:,}",
            f"{each['token_rows'] / 1e6:.1f} M",
            number(each["accepted_length"], ".2f"),
            *(f"{share:.2f}" for share in each["top1_K"]),
            *[""] * (count - len(each["top1_K"])),
        ]
        for name, each in found.items()
    ]
    head = ["drafter", "parameters", "steps", "token rows", "accepted length"]
    words = (
        "Accepted length is simulated on held-out answers with 16 nodes; behind it stands how "
        "often the best guess is right, guess by guess."
    )
    body = table([*head, *(f"guess {k + 1}" for k in range(count))], cells)
    return framed("After one budget", words, body, ALIKE)


def drafters_temperatures() -> str:
    """All drafters at each temperature: accepted length and speed-up."""
    if not measured(TEMPERATURES):
        return LEFT_OUT
    found = by_drafter(TEMPERATURES, "temperature")
    temperatures = list(dict.fromkeys(t for rows in found.values() for t in rows))
    cells = []
    for name, rows in found.items():
        pairs = [
            (number(row.get("accepted_length"), ".2f"), number(row.get("speedup"), ".2f"))
            for row in (rows.get(t, {}) for t in temperatures)
        ]
        cells.append([f"[`{name}`](../drafters/{name}.md)", *(x for pair in pairs for x in pair)])
    head = ["drafter"]
    for t in temperatures:
        head += [f"T = {t:g}: accepted length", "speed-up"]
    words = (
        "Above temperature 0 the target's tokens are drawn (target sampling), so that the text "
        "keeps the target's distribution. Each speed-up is over plain decoding at that temperature."
    )
    return framed("By temperature", words, table(head, cells), TEMPERATURES)


def drafters_nodes() -> str:
    """All drafters with trees of each size: accepted length, and what verifying them takes."""
    if not measured(BY_NODES):
        return LEFT_OUT
    found = by_drafter(BY_NODES, "size")
    sizes = list(dict.fromkeys(n for rows in found.values() for n in rows))
    cells = [
        [
            f"[`{name}`](../drafters/{name}.md)",
            *(number(rows.get(n, {}).get("accepted_length"), ".2f") for n in sizes),
        ]
        for name, rows in found.items()
    ]
    verify = {n: [rows[n]["verify_ms"] for rows in found.values() if fills(rows, n)] for n in sizes}
    costs = [f"{sum(ms) / len(ms):.1f}" if ms else "" for ms in verify.values()]
    plain = [row["plain_verify_ms"] for rows in found.values() for row in rows.values()]
    head = ["drafter", *(f"{n} nodes" for n in sizes)]
    words = (
        "Accepted length with grown trees of so many nodes, root included. The last row is what "
        "the target takes to verify such a tree, on average over the drafters whose trees have "
        f"that size; a plain pass takes {sum(plain) / len(plain):.1f} ms. Where it rises faster "
        "than the accepted length, a larger tree does not pay."
    )
    body = table(head, [*cells, ["*verify, ms*", *costs]])
    picture = "\n![Accepted length and verify time by nodes](../images/accepted-by-nodes.svg)\n"
    return framed("By nodes", words, body + picture, BY_NODES)


def fills(rows: dict[int, dict[str, Any]], nodes: int) -> bool:
    """Says whether the trees have nearly the size allowed: lookups draft only what they find."""
    return nodes in rows and rows[nodes]["nodes"] > 0.8 * nodes


def rivals() -> str:
    """specsplit beside other engines: ours over the best, everybody's speeds, who was left out."""
    if not measured(RIVALS):
        return LEFT_OUT
    data = load(RIVALS)
    shape = ", ".join(
        f"{each['prompts']} {name} prompts of {each['tokens']:.0f} tokens on average"
        for name, each in data["contexts"].items()
    )
    words = (
        f"All engines decode {shape} in one run, {data['max_new_tokens']} new tokens each, at "
        f"temperature 0 with {data['threads']} threads. Each engine and mode is a process of its "
        f"own; they take turns in {data['rounds']} rounds, over which figures are medians with "
        "their ranges. Tokens a second are of decoding alone. Prefill is the time of the prompt's "
        "own pass. Every mode keeps the engine's own text up to rounding; the others' prompt "
        f"lookups draft up to {data['lookup_tokens']} tokens. First, our best over the best of all "
        "others:"
    )
    best = [
        [
            f"{row['precision']}, {row['context']} prompts",
            row["kind"],
            row["ours"],
            row["rival"],
            f"{row['ratio']:.2f} ({row['least']:.2f} to {row['greatest']:.2f})",
        ]
        for row in data["best"]
    ]
    body = table(["", "compared", "ours", "the best rival", "ratio"], best, left=4)
    body += "\n![Tokens a second by engine and mode](../images/rivals.svg)\n"
    for precision, found in value(data, "precisions", RIVALS).items():
        body += f"\n### Engines at {precision}\n{rivals_table(found)}"
    versions = ", ".join(f"{name} {version}" for name, version in data["versions"].items())
    body += (
        "*As its plain*: answers that equal those of the same engine's plain decoding. *As same "
        "weights*: answers that equal those of the first engine with the same weights. *fp32's "
        "choice*: tokens that the target in fp32 would choose too, behind the same text. Memory is "
        f"the process's peak resident size, loading included. Versions: {versions}.\n\n"
    )
    absent = [*data["left_out"], *data["failed"]]
    lines = [f"- {each['engine']}, {each['what']}: {each['reason']}." for each in absent]
    body += "\n".join(["Not measured:\n", *lines]) + "\n" if lines else ""
    return framed("Beside other engines", words, body, RIVALS)


def rivals_table(found: dict[str, dict[str, dict[str, Any]]]) -> str:
    """Returns one precision's table: a row a contender, columns by context."""
    names = list(dict.fromkeys(name for each in found.values() for name in each))
    head, rows = ["engine, mode", "weights"], {name: [name] for name in names}
    for name in names:
        rows[name].append(next(each[name]["weights"] for each in found.values() if name in each))
    for context, contenders in found.items():
        head += [f"{context}: tokens/s", "prefill ms", "peak MB"]
        head += ["as its plain", "as same weights", "fp32's choice"]
        for name in names:
            rows[name] += rival_cells(contenders[name]) if name in contenders else [""] * 6
    return table(head, list(rows.values()), left=2)


def rival_cells(each: dict[str, Any]) -> list[str]:
    speed = each["tokens_per_second"]
    shares = [
        "" if found is None else f"{found['identical']} of {found['prompts']}"
        for found in (each["same_engine"], each["same_weights"])
    ]
    return [
        f"{speed['median']:.1f} ({speed['least']:.1f} to {speed['greatest']:.1f})",
        f"{each['prefill_ms']['median']:.0f}",
        f"{each['peak_rss'] / 1e6:.0f}",
        *shares,
        number(each["fp32_choices"], ".1%"),
    ]


def spec_bench() -> str:
    """All of Spec-Bench by subset, a table for each precision that is measured."""
    files = [name for name in SPEC_BENCH if measured(name)]
    body = "".join(spec_bench_table(name) for name in files)
    if not files:
        return LEFT_OUT
    overall = load(files[0])["overall"]
    tokens = load(files[0])["max_new_tokens"]
    words = (
        f"{overall['prompts']} questions with {overall['turns']} turns, {tokens} new tokens a "
        "turn, at temperature 0, with the bundle's own drafter and plainly; each second turn "
        "follows that way's own first answer. *Speed-up* is of decoding alone, *end to end* with "
        "the prompts' passes, both over all tokens; "
        "*Spec-Bench's* is its own ratio of means over questions, prompts' passes included."
    )
    return f"\n\n## All of Spec-Bench\n\n{words}\n{body}"


def spec_bench_table(file: str) -> str:
    data = load(file)
    overall = {"all questions": value(data, "overall", file)}
    rows = [
        [
            name if name in overall else f"`{name}`",
            f"{each['prompts']}",
            f"{each['plain_tokens_per_second']:.1f}",
            f"{each['tokens_per_second']:.1f}",
            *(
                f"{each[key]:.2f}"
                for key in ("speedup", "speedup_end_to_end", "speedup_of_means", "accepted_length")
            ),
            f"{each['identical']:.1%}",
        ]
        for name, each in (overall | data["categories"]).items()
    ]
    head = ["subset", "questions", "plain tokens/s", "tokens/s", "speed-up", "end to end"]
    body = table([*head, "Spec-Bench's", "accepted length", "identical"], rows)
    parted = (
        f"Questions whose answers differ from plain decoding's: {len(data['divergences'])}. Of "
        f"these {data['near_ties']} part at a near tie and {data['wider']} at a wider gap."
    )
    heading = f"\n### All questions at {data['precision']}\n"
    return f"{heading}{body}{parted}\n\nMeasured: {source(file)}\n\n"


def steps() -> str:
    """What a pass costs at each precision, context and number of nodes, and by operator."""
    if not measured(STEPS):
        return LEFT_OUT
    data = load(STEPS)
    words = (
        "A pass of the target over a chain of nodes behind so many committed tokens, in "
        f"milliseconds on {data['threads']} threads: the median of {data['repeats']} repeats and "
        "their range. "
        "*Of one node* is a pass's time over that of a single node with the same context: what "
        "speculation pays for a tree."
    )
    body = ""
    for precision, rows in value(data, "passes", STEPS).items():
        cells = [
            [
                f"{row['context']}",
                f"{row['nodes']}",
                spread(row["ms"]),
                f"{row['over_one_node']:.2f}",
                f"{row['over_first']:.2f}",
            ]
            for row in rows
        ]
        head = ["context", "nodes", "ms: median (range)", "of one node", "of the first row"]
        body += f"\n### Passes at {precision}\n{table(head, cells)}"
        for each in data["operators"].get(precision, ()):
            parts = ", ".join(f"{name} {ms:.1f}" for name, ms in each["ms"].items())
            size = f"{each['context']} tokens, {each['nodes']} nodes"
            body += f"\n- by operator, {size}, under the profiler: {parts}"
        body += "\n"
    return framed("What a pass costs", words, body, STEPS)


def quality() -> str:
    """How far exported graphs are from the float32 model, by precision."""
    if not measured(CHECK):
        return LEFT_OUT
    data = load(CHECK)
    rows: dict[str, dict[str, dict[str, Any]]] = {}
    for row in value(data, "rows", CHECK):
        rows.setdefault(row["precision"], {})[row["name"]] = row
    head = ["precision", "perplexity ratio", "bound", "other best token", "divergence", "verdict"]
    cells = [
        [
            f"`{precision}`",
            f"{found['perplexity ratio']['value']:.4f}",
            f"{found['perplexity ratio']['bound']:g}",
            f"{found['other argmax']['value']:.1%}",
            f"{found['divergence']['value']:.2g}",
            "ok" if all(row["passed"] for row in found.values()) else "FAILED",
        ]
        for precision, found in rows.items()
    ]
    num_tokens = rows["fp32"]["perplexity ratio"]["note"].rpartition(", ")[2]  # "1449 tokens"
    words = (
        f"Exports of {data['model']} against transformers in float32. *Perplexity ratio* is of "
        f"{num_tokens} of `assets/perplexity.txt`; "
        "*other best token* and *divergence* (Kullback-Leibler, nats a row) are over all rows of "
        "the check's passes: chunks, trees, permuted slots and the full context among them."
    )
    return framed("How close exports are", words, table(head, cells), CHECK)


def training_data() -> str:
    """Where the demo's training answers come from: tokens by kind of prompt and by licence."""
    if not measured(TRAINING_DATA):
        return LEFT_OUT
    data = load(TRAINING_DATA)
    kinds: dict[str, dict[str, float]] = {}
    for name, each in value(data, "source", TRAINING_DATA).items():
        kind = kinds.setdefault(name.partition("/")[0], dict.fromkeys(each, 0))
        for key in ("rows", "prompt_tokens", "answer_tokens"):
            kind[key] += each[key]
    body = ""
    for head, found in (("prompts", kinds), ("licence of the prompts", data["licence"])):
        rows = [
            [name, *(f"{each[key]:,.0f}" for key in ("rows", "prompt_tokens", "answer_tokens"))]
            for name, each in sorted(found.items(), key=lambda item: -item[1]["answer_tokens"])
        ]
        body += table([head, "rows", "prompt tokens", "answer tokens"], rows)
    total = data["all"]["all"]
    words = (
        f"{total['answer_tokens'] / 1e6:.1f} M answer tokens in {total['rows']:,} rows, which lie "
        "in `recipes/smollm2-135m/answers` with a page about their sources. Every answer is the "
        "target's own."
    )
    return framed("Answers to learn from", words, body, TRAINING_DATA)


def training_overlap() -> str:
    """How many training rows share text with evaluation files."""
    if not measured(OVERLAP):
        return LEFT_OUT
    data = load(OVERLAP)
    rows = []
    for name, sources in value(data, "files", OVERLAP).items():
        sums = [
            sum(each[key] for each in sources.values()) for key in ("rows", "prompts", "answers")
        ]
        rows.append([f"`{name}`", *(f"{count:,}" for count in sums)])
    words = (
        f"Rows that share {data['words']} words in a row with any text of "
        f"{', '.join(data['evaluation'])}. Of the broad answers such rows were left out before. "
        "Answers are the target's own words, which may recite what it was trained on."
    )
    body = table(["answers", "rows", "overlap in the prompt", "in the answer"], rows)
    return framed("Overlap with evaluation prompts", words, body, OVERLAP)


def shipped_drafters(_: str) -> str:
    """The drafters in the package: steps, held-out accepted length, and what they took."""
    rows = []
    for folder in sorted(SHIPPED.iterdir()):
        about = json.loads((folder / "config.json").read_text(encoding="utf-8"))["provenance"]
        hours = about.get("cpu_hours")
        rows.append(
            [
                f"[`{folder.name}`](../drafters/{folder.name}.md)",
                f"{about['steps']:,}",
                f"{about['data']['answer_tokens'] / 1e6:.1f} M",
                f"{about['validation']['accepted_length']:.2f}",
                "not recorded" if hours is None else f"{hours['features']} + {hours['steps']}",
                about["date"][:10],
            ]
        )
    head = ["drafter", "steps", "answer tokens", "simulated accepted length"]
    return table([*head, "CPU hours: features + steps", "date"], rows)


def training_steps() -> str:
    """What a training step costs in several forms of the recipe, and where the time goes."""
    if not measured(TRAINING_STEPS):
        return LEFT_OUT
    rows = []
    for each in value(load(TRAINING_STEPS), "rows", TRAINING_STEPS):
        parts = each["part_seconds"]
        total = sum(parts.values())
        rows.append(
            [
                each["variant"],
                f"{each['tokens'] / each['wall_seconds']:,.0f}",
                f"{1000 * each['cpu_seconds'] / each['tokens']:.2f}",
                *(f"{seconds / total:.0%}" for seconds in parts.values()),
            ]
        )
    head = ["step", "answer tokens/s", "CPU seconds a 1,000", *parts]
    words = (
        "ParallelSpec's step in the recipe's form and in others, measured one after the other; "
        "shares of a step's time are from PyTorch's profiler."
    )
    return framed("What a training step costs", words, table(head, rows), TRAINING_STEPS)


def joint_runs() -> str:
    """Drafters trained with their target: its perplexity, and what they are worth in decoding."""
    files = [name for name in JOINT if measured(name)]
    if not files:
        return LEFT_OUT
    body = ""
    for file in files:
        data = load(file)
        rows = []
        for stage, each in value(data, "stages", file).items():
            overall = each["drafting"]["overall"]
            rows.append(
                [
                    stage,
                    "merged" if each["target_modified"] else "frozen",
                    f"{each['steps']:,}",
                    *(f"{each[text]['perplexity']:.2f}" for text in ("prose", "held_out")),
                    f"{overall['accepted_length']:.2f}",
                    f"{overall['speedup']:.2f}",
                ]
            )
        head = ["stage", "target", "steps", "perplexity: prose", "held-out answers"]
        lengths = ["accepted length", "speed-up"]
        body += f"\n### {data['study']}\n{table([*head, *lengths], rows, left=2)}"
        body += f"Measured: {source(file)}\n"
    words = (
        "Each study trains a drafter on the frozen target and with it (a LoRA adapter, merged "
        "afterwards), and decodes Spec-Bench's prompts without lookup. A merged target writes "
        "other texts than the original one: perplexity says how far it moved."
    )
    return f"\n\n## Trained together with the target\n\n{words}\n{body}\n"


SECTIONS: dict[str, Callable[[], str]] = {
    "training_data": training_data,
    "training_overlap": training_overlap,
    "training_steps": training_steps,
    "joint_runs": joint_runs,
    "quality": quality,
    "steps": steps,
    "rivals": rivals,
    "spec_bench": spec_bench,
    "options": options_study,
    "masks": masks_speed,
    "alike": drafters_alike,
    "temperatures": drafters_temperatures,
    "nodes": drafters_nodes,
}


def compare(file: str) -> str:
    """Several drafters of one run side by side, such as one with and without lookup."""
    if not measured(file):
        return NOT_MEASURED
    data = load(file)
    rows = []
    for name, each in value(data, "drafters", file).items():
        overall = each["overall"]
        end = overall.get("speedup_end_to_end")
        rows.append(
            [
                f"`{name}`",
                f"{overall['nodes_per_step']:.1f}",
                f"{overall['accepted_length']:.2f}",
                f"{overall['tokens_per_second']:.1f}",
                f"{headline(overall, data['precision']):.2f}",
                number(end, ".2f"),
                f"{overall['draft_ms']:.1f}",
                f"{overall['verify_ms']:.1f}",
            ]
        )
    head = ["drafter", "drafted nodes", "accepted length", "tokens/s", "speed-up, decoding"]
    return table([*head, "end to end", "draft ms", "verify ms"], rows)


def audit(_: str) -> str:
    """Every precision's audit: what was compared, what parted, and the limits."""
    rows = []
    for name in ("fp32", "fp32-strict", "int8", "int4"):
        each = load(f"audit-{name}")
        counts, delta = each["counts"], each["delta_logit"]
        rows.append(
            [
                name.replace("-strict", ", `--strict`"),
                f"{each['tokens']:,}",
                f"{each['divergences_per_1000_tokens']:.0f}",
                str(counts["near tie"]),
                str(counts["rounding"]),
                str(counts["real"]),
                str(len(each["unjustified"])),
                f"{delta['tree_rows']['maximum']:.2g}",
                f"{each['rounding_limit']:.2g}",
                *([f"{each['row_limit']:.2g}"] if "row_limit" in each else []),
            ]
        )
    head = ["bundle", "tokens", "divergences in 1,000", "near ties", "rounding", "real"]
    head += ["not their row's", "largest deviation of a logit", "limit of a gap"]
    return table([*head, *["limit of a row"] * (len(rows[0]) - len(head))], rows)


def memory(_: str) -> str:
    """Peak memory of one generation against the files it reads."""
    rows = load("memory-fp32")["drafters"]
    columns = {
        "after import MB": "import_bytes",
        "peak MB": "peak_bytes",
        "weight files MB": "weight_bytes",
        "files MB": "file_bytes",
        "of them read MB": "read_bytes",
        "key/value rows MB": "cache_bytes",
    }
    shown = {head: key for head, key in columns.items() if key in rows[0]}
    ratios = {"peak over read": "peak_over_read", "ratio": "ratio"}
    (ratio,) = (head for head, key in ratios.items() if key in rows[0])
    cells = [
        [
            f"`{each['drafter']}`",
            *(f"{each[key] / 1e6:.0f}" for key in shown.values()),
            f"{each[ratios[ratio]]:.2f}",
        ]
        for each in rows
    ]
    return table(["drafter", *shown, ratio], cells)


def memory_note(_: str) -> str:
    """Says what the last column of `memory` divides by."""
    if "read_bytes" in load("memory-fp32")["drafters"][0]:
        return (
            "*Files* are those that the engine opens; what of them was never touched, most of an "
            "embedding table for example, is not in *read*. *Peak over read* is the whole peak, "
            "import and key/value rows included, over the bytes read."
        )
    return (
        "*Ratio* is the peak less what importing costs, over the weights' files and the key/value "
        "rows. It flatters where it is near 1: the files hold an embedding table of which a short "
        "generation touches a few rows, so that it is counted but hardly read into memory."
    )


def prompts(name: str) -> str:
    """Says which prompts and turns a bench is about."""
    overall = value(load(name), "overall", name)
    if "turns" in overall:
        return (
            f"{overall['prompts']} Spec-Bench prompts with {overall['turns']} turns, ten of each "
            "subset; those of `mt_bench` are taken over all of its eight categories, second turns "
            "included"
        )
    return (
        f"{overall['prompts']} Spec-Bench prompts, first turns, ten of each subset; those of "
        "`mt_bench` are all of its category *writing*"
    )


def plans(_: str) -> str:
    """TensorRT plans that CI builds: size by GPU and seconds."""
    data = load("tensorrt-plans")
    rows = [
        [f"`{each['graph']}`", *(f"{mb:.1f}" for mb in each["plan_mb"]), f"{each['seconds']:.1f}"]
        for each in data["plans"]
    ]
    capabilities = [f"plan MB, {each}" for each in data["compute_capabilities"]]
    return table(["graph", *capabilities, "seconds to build"], rows)


def large_plans(_: str) -> str:
    """Plans of a few layers of large targets as built, and all layers as extrapolated."""
    data = load("tensorrt-large")
    rows = []
    for name, figures in data["models"].items():
        whole = figures["all_layers"] | {"layers": "32, *extrapolated*"}
        for each in (*figures["built"], whole):
            sizes = [f"{each[key] / 1000:.1f}" for key in ("weights_mb", "plan_mb", "peak_mb")]
            rows.append([name, str(each["layers"]), *sizes, f"{each['cpu_seconds']:.0f}"])
    head = ["target", "layers", "weights GB", "plan GB", "peak memory GB", "CPU seconds"]
    return table(head, rows)


def fuzz_kinds(_: str) -> str:
    """Fuzzed cases by kind, and what became of them."""
    kinds = value(load("fuzz"), "kinds", "fuzz")
    rows = [
        [name, *(f"{tally[key]:,}" for key in ("cases", "accepted", "refused", "failed"))]
        for name, tally in kinds.items()
    ]
    return table(["kind", "cases", "accepted", "refused", "failures"], rows)


def disturbances(_: str) -> str:
    """Disturbances by scenario and kind, each as recovered of tried."""
    counts = value(load("faults"), "counts", "faults")
    scenarios = list(dict.fromkeys(name for rows in counts.values() for name in rows))
    rows = [
        [
            f"`{name}`",
            *(
                f"{rows[name]['recovered']} of {rows[name]['tried']}" if name in rows else ""
                for rows in counts.values()
            ),
        ]
        for name in scenarios
    ]
    return table(["command", *counts], rows)


def faults_recovered(_: str) -> str:
    """The kills that were recovered from, of those tried."""
    rows = value(load("faults"), "counts.kill", "faults").values()
    return f"{sum(r['recovered'] for r in rows):,} of {sum(r['tried'] for r in rows):,} kills"


def soak_memory(_: str) -> str:
    """The process's own memory over a soak, with threads and open files."""
    got = load("soak")
    own, rss, counts = (
        got["memory_mb"],
        got["rss_mb"],
        {name: got[name] for name in ("threads", "files")},
    )
    kept = ", ".join(
        f"{a} {name} in the third quarter and {b} in the last" for name, (a, b) in counts.items()
    )
    return (
        f"{own['warm']:.0f} MB of its own when warm, {own['end']:.0f} MB at the end, a slope of "
        f"{own['mb_per_minute']:.2f} MB a minute over the last half (with mapped weights "
        f"{rss['warm']:.0f} and {rss['end']:.0f} MB); {kept}."
    )


def soak_requests(_: str) -> str:
    """What a soak asked, and how often."""
    rows = [[kind, f"{count:,}"] for kind, count in value(load("soak"), "by_kind", "soak").items()]
    return table(["request", "times"], rows)


def tests_by_kind(_: str) -> str:
    """The number of tests by kind."""
    counted = load("tests")
    rows = [[kind, f"{count:,}"] for kind, count in value(counted, "kinds", "tests").items()]
    return table(["kind", "tests"], [*rows, ["all", f"{counted['tests']:,}"]])


def source(name: str) -> str:
    """One line under a table: command, commit, date and CPU of the JSON behind it."""
    if not measured(name):
        return f"`results/{name}.json` is not there yet"
    data = load(name)
    found = provenance(name, data)
    parts = [f"`results/{name}.json`"]
    commit, date = found["commit"], found["date"]
    parts.append(f"commit `{commit[:9]}`" if commit else "commit not recorded")
    parts.append(str(date)[:10] if date else "date not recorded")
    parts.append(str(found["cpu"]) if found["cpu"] else "CPU not recorded")
    if found["command"]:
        parts.append(f"`{found['command']}`")
    if found["note"]:
        parts.append(found["note"].partition("; not recorded")[0])
    return " · ".join(parts)


def source_line(name: str) -> str:
    """The line under a table as a paragraph of its own."""
    return f"\n\nMeasured: {source(name)}\n\n"


TABLES: dict[str, Callable[[str], str]] = {
    "readme": readme,
    "bench": bench,
    "aims": aims,
    "end_to_end": end_to_end,
    "drafters": drafters,
    "drafter": drafter,
    "accuracy": accuracy,
    "compare": compare,
    "section": section,
    "shipped_drafters": shipped_drafters,
    "acceptance": acceptance,
    "sweep": sweep,
    "threads": threads,
    "ablation": ablation,
    "ablation_lengths": ablation_lengths,
    "audit": audit,
    "memory": memory,
    "memory_note": memory_note,
    "prompts": prompts,
    "plans": plans,
    "large_plans": large_plans,
    "fuzz_kinds": fuzz_kinds,
    "disturbances": disturbances,
    "faults_recovered": faults_recovered,
    "soak_requests": soak_requests,
    "soak_memory": soak_memory,
    "tests_by_kind": tests_by_kind,
    "source": source_line,
}


# ---- documents


def render(name: str) -> str:
    """Returns the Markdown that belongs between the markers of the block called `name`."""
    word, _, rest = name.partition(" ")
    if word in TABLES:
        return TABLES[word](rest)
    match = re.fullmatch(r"(\S+) (.+) (\S+)", name)
    if match is None:
        raise FigureError(
            f"got figures block {name!r}, expected FILE PATH FORMAT or one of {', '.join(TABLES)}"
        )
    file, path, form = match.groups()
    got = value(load(file), path, file)
    try:
        return format(got, form)
    except (TypeError, ValueError):
        raise FigureError(f"got {got!r} for {name!r}, which {form!r} does not format") from None


def documents() -> Iterator[Path]:
    """Yields every Markdown file that may hold a block."""
    yield ROOT / "README.md"
    yield from sorted((ROOT / "docs").rglob("*.md"))


def rendered(text: str) -> str:
    """Returns a document's text with all of its blocks rendered anew."""
    return BLOCK.sub(lambda block: block["begin"] + render(block["name"]) + block["end"], text)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if a block is stale")
    args = parser.parse_args()
    stale = []
    for file in documents():
        text = file.read_text(encoding="utf-8")
        try:
            new = rendered(text)
        except FigureError as error:
            print(f"error: {file.relative_to(ROOT)}: {error}", file=sys.stderr)
            return 2
        if new != text:
            stale.append(file.relative_to(ROOT))
            if not args.check:
                file.write_text(new, encoding="utf-8")
    for each in stale:
        print(f"{each}: {'is not what its JSON says' if args.check else 'rendered'}")
    return 1 if args.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
