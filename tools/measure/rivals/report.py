"""Sums up a race: speeds with their spread, memory, whose texts agree, ours over the best rival.

Everything here is computed from the journal's rows, so that fixed rows give fixed figures.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from spec_runtime.loop.stats import ratio
from spec_runtime.measure.audit import first_difference
from tools.figures import markdown, spread, spread_text
from tools.measure.rivals.field import PLAIN, Contender
from tools.measure.rivals.race import Row

Figures = dict[str, Any]
Texts = Mapping[str, list[int]]  # a contender's tokens by prompt

# What is set against the best rival: the key of the figures, and the mode (None: the fastest).
KINDS = (
    ("best mode", "tokens_per_second", None),
    ("plain", "tokens_per_second", PLAIN),
    ("prefill", "prefill_ms", PLAIN),
)
HEAD = (
    *("contender", "prompts", "tokens/s", "prefill ms", "peak MB", "PSS MB"),
    *("same text as its plain", "as same weights", "fp32's choice"),
)


def summarise(
    rows: Sequence[Row],
    contenders: Sequence[Contender],
    choices: Mapping[str, Mapping[str, float]] | None = None,
) -> dict[str, Figures]:
    """Returns, by context and contender, what one precision's rows come to.

    Of a contender, speeds are by round, over all prompts of the context: a median with the least
    and the greatest. `prefill_ms` is the mean over prompts, its spread that over rounds too.
    `fp32_choices` is what fidelity.py says, if it was asked: where the share is small, the weights
    are another model's.
    """
    found: dict[str, Figures] = {}
    by_name = {each.name: each for each in contenders}
    for context in dict.fromkeys(row["context"] for row in rows):
        here = [row for row in rows if row["context"] == context]
        all_texts = {name: texts(here, name) for name in by_name}
        found[context] = {
            name: _contender(contender, [row for row in here if row["contender"] == name])
            | _agreement(contender, contenders, all_texts)
            | {"fp32_choices": (choices or {}).get(context, {}).get(name)}
            for name, contender in by_name.items()
            if all_texts[name]
        }
    return found


def _contender(contender: Contender, rows: Sequence[Row]) -> Figures:
    rounds: dict[int, list[Row]] = {}
    for row in rows:
        rounds.setdefault(row["round"], []).append(row)
    speeds, prefill = [], []
    for _, each in sorted(rounds.items()):
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
        "tokens_per_second": _spread(speeds),
        "prefill_ms": _spread(prefill),
        "prompt_tokens": statistics.mean(row["prompt_tokens"] for row in rows),
        "peak_rss": max((row.get("peak_rss", 0) for row in rows), default=0),
        "pss": max((row.get("pss", 0) for row in rows), default=0),
        "others_cpu_share": max(row["others_cpu_seconds"] / row["seconds"] for row in rows),
        "repeats_itself": _repeats(rows),
    }


def _spread(values: Sequence[float]) -> Figures:
    return {**spread(values), "by_round": list(values)}


def _repeats(rows: Sequence[Row]) -> bool:
    """Says whether every round wrote the same texts."""
    first: dict[str, list[int]] = {}
    return all(first.setdefault(row["prompt"], row["tokens"]) == row["tokens"] for row in rows)


def texts(rows: Sequence[Row], name: str) -> dict[str, list[int]]:
    """Returns the tokens of a contender's last round by prompt."""
    return {row["prompt"]: row["tokens"] for row in rows if row["contender"] == name}


def _agreement(
    contender: Contender,
    contenders: Sequence[Contender],
    written: Mapping[str, Texts],
) -> Figures:
    """Compares texts with the same engine's plain ones, and with the first on the same weights."""
    present = [each for each in contenders if written[each.name]]
    alike = [each for each in present if each.weights == contender.weights]
    own = [each for each in present if each.engine == contender.engine and each.mode == PLAIN]
    found = {}
    for key, references in (("same_engine", own), ("same_weights", alike)):
        reference = references[0] if references and references[0] != contender else None
        found[key] = reference and {
            "reference": reference.name,
            **compare(written[reference.name], written[contender.name]),
        }
    return found


def compare(expected: Texts, got: Texts) -> Figures:
    """Returns how many prompts' texts are identical, and where the others part.

    An id of None is the end of that text.
    """
    differences = []
    both = sorted(expected.keys() & got.keys())
    for prompt in both:
        at = first_difference(expected[prompt], got[prompt])
        if at is not None:
            pair = [ids[at] if at < len(ids) else None for ids in (expected[prompt], got[prompt])]
            differences.append(
                {"prompt": prompt, "position": at, "expected": pair[0], "got": pair[1]}
            )
    return {
        "prompts": len(both),
        "identical": len(both) - len(differences),
        "differences": differences,
    }


def aims(precision: str, contexts: Mapping[str, Mapping[str, Figures]]) -> list[Figures]:
    """Returns our best over the rivals' best, by context: in any mode, plainly, and in prefill.

    Speeds are tokens a second of decoding; prefill is the rival's time over ours: above 1 we are
    faster. A ratio's range is over rounds, each against the same round of the other. A row is left
    out where one of the two sides has nothing.
    """
    rows = []
    for context, contenders in contexts.items():
        for kind, key, mode in KINDS:
            allowed = {n: each for n, each in contenders.items() if mode in (None, each["mode"])}
            ours = _best({n: each for n, each in allowed.items() if each["ours"]}, key)
            rival = _best({n: each for n, each in allowed.items() if not each["ours"]}, key)
            if ours is None or rival is None:
                continue
            above, below = contenders[ours][key], contenders[rival][key]
            if key == "prefill_ms":  # a time
                above, below = below, above
            ratios = [
                ratio(a, b) for a, b in zip(above["by_round"], below["by_round"], strict=True)
            ]
            rows.append(
                {
                    "precision": precision,
                    "context": context,
                    "kind": kind,
                    "ours": ours,
                    "rival": rival,
                    "ratio": ratio(above["median"], below["median"]),
                    "least": min(ratios),
                    "greatest": max(ratios),
                }
            )
    return rows


def _best(contenders: Mapping[str, Figures], key: str) -> str | None:
    """Returns the fastest, by its median: of times the least, of speeds the greatest."""
    sign = 1 if key == "prefill_ms" else -1
    return min(contenders, key=lambda name: sign * contenders[name][key]["median"], default=None)


def table(precision: str, contexts: Mapping[str, Mapping[str, Figures]]) -> str:
    """Returns a Markdown table of one precision, for the terminal."""
    rows = [
        [
            name,
            context,
            spread_text(each["tokens_per_second"], ".1f"),
            f"{each['prefill_ms']['median']:.0f}",
            f"{each['peak_rss'] / 1e6:.0f}",
            f"{each['pss'] / 1e6:.0f}",
            *(
                "" if found is None else f"{found['identical']} of {found['prompts']}"
                for found in (each["same_engine"], each["same_weights"])
            ),
            "" if each["fp32_choices"] is None else f"{each['fp32_choices']:.1%}",
        ]
        for context, contenders in contexts.items()
        for name, each in contenders.items()
    ]
    return f"### {precision}\n\n{markdown(HEAD, rows, left=2)}"


def aim_lines(rows: Sequence[Figures]) -> list[str]:
    """Returns one line for each row of `aims`."""
    return [
        f"{row['precision']}, {row['context']} prompts, {row['kind']}: {row['ratio']:.2f} "
        f"({row['least']:.2f} to {row['greatest']:.2f}), {row['ours']} over {row['rival']}"
        for row in rows
    ]
