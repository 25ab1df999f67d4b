"""Sums up a race: speeds with their spread, memory, whose texts agree, ours over the best rival.

Everything here is computed from the journal's rows, so that fixed rows give fixed figures.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from rivals.field import PLAIN, Contender
from rivals.race import Row
from spec_runtime.measure.audit import first_difference
from spec_runtime.stats import ratio

Figures = dict[str, Any]


def summarise(rows: Sequence[Row], contenders: Sequence[Contender]) -> dict[str, Figures]:
    """Returns, by context and contender, what one precision's rows come to.

    Of a contender, speeds are by round, over all prompts of the context: a median with the least
    and the greatest. `prefill_ms` is the mean over prompts, its spread that over rounds too.
    """
    found: dict[str, Figures] = {}
    by_name = {each.name: each for each in contenders}
    for context in dict.fromkeys(row["context"] for row in rows):
        here = [row for row in rows if row["context"] == context]
        texts = {name: _texts(here, name) for name in by_name}
        found[context] = {
            name: _contender(contender, [row for row in here if row["contender"] == name])
            | _agreement(contender, contenders, texts)
            for name, contender in by_name.items()
            if texts[name]
        }
    return found


def _contender(contender: Contender, rows: Sequence[Row]) -> Figures:
    rounds: dict[int, list[Row]] = {}
    for row in rows:
        rounds.setdefault(row["round"], []).append(row)
    speeds, prefill = [], []
    for each in rounds.values():
        tokens = sum(len(row["tokens"]) - row["first"] for row in each)
        seconds = sum(row["seconds"] - row["prefill_seconds"] for row in each)
        speeds.append(ratio(tokens, seconds))
        prefill.append(1000 * statistics.mean(row["prefill_seconds"] for row in each))
    return {
        "engine": contender.engine,
        "mode": contender.mode,
        "weights": contender.weights,
        "ours": contender.is_ours,
        "rounds": len(rounds),
        "tokens": sum(len(row["tokens"]) for row in rows) / len(rounds),
        "tokens_per_second": {**_spread(speeds), "rounds": speeds},
        "prefill_ms": {**_spread(prefill), "rounds": prefill},
        "prompt_tokens": statistics.mean(row["prompt_tokens"] for row in rows),
        "peak_rss": max((row.get("peak_rss", 0) for row in rows), default=0),
        "pss": max((row.get("pss", 0) for row in rows), default=0),
        "others_cpu_share": max(row["others_cpu_seconds"] / row["seconds"] for row in rows),
        "repeats_itself": _repeats(rows),
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {
        "median": statistics.median(values),
        "least": min(values),
        "greatest": max(values),
    }


def _repeats(rows: Sequence[Row]) -> bool:
    """Says whether every round wrote the same texts."""
    first: dict[str, list[int]] = {}
    return all(first.setdefault(row["prompt"], row["tokens"]) == row["tokens"] for row in rows)


def _texts(rows: Sequence[Row], name: str) -> dict[str, list[int]]:
    """Returns the tokens of a contender's last round by prompt."""
    return {row["prompt"]: row["tokens"] for row in rows if row["contender"] == name}


def _agreement(
    contender: Contender,
    contenders: Sequence[Contender],
    texts: Mapping[str, Mapping[str, list[int]]],
) -> Figures:
    """Compares texts with the same engine's plain ones, and with the first on the same weights."""
    present = [each for each in contenders if texts[each.name]]
    alike = [each for each in present if each.weights == contender.weights]
    own = [each for each in present if each.engine == contender.engine and each.mode == PLAIN]
    found = {}
    for key, references in (("same_engine", own), ("same_weights", alike)):
        reference = references[0] if references and references[0] != contender else None
        found[key] = reference and {
            "reference": reference.name,
            **compare(texts[reference.name], texts[contender.name]),
        }
    return found


def compare(expected: Mapping[str, list[int]], got: Mapping[str, list[int]]) -> Figures:
    """Returns how many prompts' texts are identical, and where the others part.

    An id of None is the end of that text.
    """
    differences = []
    for prompt in expected.keys() & got.keys():
        at = first_difference(expected[prompt], got[prompt])
        if at is not None:
            pair = [ids[at] if at < len(ids) else None for ids in (expected[prompt], got[prompt])]
            differences.append(
                {"prompt": prompt, "position": at, "expected": pair[0], "got": pair[1]}
            )
    prompts = len(expected.keys() & got.keys())
    differences.sort(key=lambda each: each["prompt"])
    return {
        "prompts": prompts,
        "identical": prompts - len(differences),
        "differences": differences,
    }


def aims(precision: str, contexts: Mapping[str, Mapping[str, Figures]]) -> list[Figures]:
    """Returns our best over the rivals' best, by context: in any mode, plainly, and in prefill.

    Speeds are tokens a second of decoding, prefill is the rival's time over ours: above 1 we are
    faster. A ratio's range is over rounds, each against the same round of the other. A row is left
    out where one of the two sides has nothing.
    """
    rows = []
    for context, contenders in contexts.items():
        for kind, key, modes in (
            ("best mode", "tokens_per_second", None),
            ("plain", "tokens_per_second", PLAIN),
            ("prefill", "prefill_ms", PLAIN),
        ):
            allowed = {n: f for n, f in contenders.items() if modes in (None, f["mode"])}
            sides = [
                {n: f for n, f in allowed.items() if f["ours"] == is_ours} for is_ours in (1, 0)
            ]
            if not all(sides):
                continue
            ours, rival = (_best(side, key) for side in sides)
            pairs = [
                (contenders[name][key]["rounds"], contenders[name][key]["median"])
                for name in ((ours, rival) if key == "tokens_per_second" else (rival, ours))
            ]
            ratios = [ratio(a, b) for a, b in zip(pairs[0][0], pairs[1][0], strict=False)]
            rows.append(
                {
                    "precision": precision,
                    "context": context,
                    "kind": kind,
                    "ours": ours,
                    "rival": rival,
                    "ratio": ratio(pairs[0][1], pairs[1][1]),
                    "least": min(ratios),
                    "greatest": max(ratios),
                }
            )
    return rows


def _best(contenders: Mapping[str, Figures], key: str) -> str:
    """Returns the fastest: of times the least, of speeds the greatest median."""
    sign = 1 if key == "prefill_ms" else -1
    return min(contenders, key=lambda name: sign * contenders[name][key]["median"])


def table(precision: str, contexts: Mapping[str, Mapping[str, Figures]]) -> str:
    """Returns a Markdown table of one precision, for the terminal."""
    head = ["contender", "prompts", "tokens/s", "range", "prefill ms", "peak MB", "PSS MB"]
    lines = [f"### {precision}", "", *_lines([[*head, "as its plain", "as same weights"]])]
    for context, contenders in contexts.items():
        for name, each in contenders.items():
            speed = each["tokens_per_second"]
            cells = [
                name,
                context,
                f"{speed['median']:.1f}",
                f"{speed['least']:.1f} to {speed['greatest']:.1f}",
                f"{each['prefill_ms']['median']:.0f}",
                f"{each['peak_rss'] / 1e6:.0f}",
                f"{each['pss'] / 1e6:.0f}",
                agreement(each["same_engine"]),
                agreement(each["same_weights"]),
            ]
            lines += _lines([cells])[:1]
    return "\n".join(lines)


def _lines(rows: Sequence[Sequence[str]]) -> list[str]:
    return ["| " + " | ".join(rows[0]) + " |", "|" + "---|" * len(rows[0])]


def agreement(found: Figures | None) -> str:
    """Returns the share of texts that are identical as words: "7 of 8"; nothing without one."""
    return "" if found is None else f"{found['identical']} of {found['prompts']}"


def aim_lines(rows: Sequence[Figures]) -> list[str]:
    """Returns one line for each row of `aims`."""
    return [
        f"{row['precision']}, {row['context']} prompts, {row['kind']}: {row['ratio']:.2f} "
        f"({row['least']:.2f} to {row['greatest']:.2f}), {row['ours']} over {row['rival']}"
        for row in rows
    ]
