"""Sums up a race: speeds with their spread, memory, whose texts agree, ours over the best rival.

Everything here is computed from the race's rows, so that fixed rows give fixed figures.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from spec_runtime.loop.stats import ratio
from spec_runtime.measure.audit import first_difference
from tools.figures import spread
from tools.measure.rivals.field import ALONE, LANES, OURS, PLAIN, Contender
from tools.measure.rivals.race import Row

Figures = dict[str, Any]
Texts = Mapping[str, list[int]]  # tokens by prompt

# What is set against the best rival: the key of the figures, and the mode (None: the fastest).
KINDS = (
    ("best mode", "tokens_per_second", None),
    ("plain", "tokens_per_second", PLAIN),
    ("prefill", "prefill_ms", PLAIN),
)
BEFORE = f"{OURS}, {ALONE}"


def speed(rows: Sequence[Row], with_first: bool = True) -> float:
    """Returns the tokens a second of all answers, or of decoding only: without the prompts' passes
    and the tokens that these give."""
    tokens = sum(len(answer["tokens"]) for row in rows for answer in row["answers"])
    seconds = sum(row["seconds"] for row in rows)
    if with_first:
        return ratio(tokens, seconds)
    answers = [answer for row in rows for answer in row["answers"]]
    first = sum(answer["parts"][0][1] for answer in answers)
    return ratio(tokens - first, seconds - sum(map(prefill_seconds, answers)))


def prefill_seconds(answer: Mapping[str, Any]) -> float:
    """Returns the time from when a prompt was sent to the first part of its answer."""
    return float(answer["parts"][0][0] - answer["sent"])


def texts(rows: Iterable[Row], name: str) -> dict[str, list[int]]:
    """Returns the tokens of a contender's last round by prompt."""
    return {
        prompt: answer["tokens"]
        for row in rows
        if row["contender"] == name
        for prompt, answer in zip(row["prompts"], row["answers"], strict=True)
    }


def compare(expected: Texts, rows: Iterable[Row]) -> Figures:
    """Returns how many answers of rows are those expected of their prompts, and where the others
    part. An id of None is the end of that text; prompts that nothing is expected of do not count.
    """
    differences, compared = [], 0
    for row in rows:
        for prompt, answer in zip(row["prompts"], row["answers"], strict=True):
            if prompt not in expected:
                continue
            compared += 1
            both = expected[prompt], answer["tokens"]
            at = first_difference(*both)
            if at is not None:
                pair = [ids[at] if at < len(ids) else None for ids in both]
                differences.append(
                    {"prompt": prompt, "position": at, "expected": pair[0], "got": pair[1]}
                )
    identical = compared - len(differences)
    return {"prompts": compared, "identical": identical, "differences": differences}


def _by(rows: Iterable[Row], *keys: str) -> dict[Any, list[Row]]:
    """Returns rows by the values of these keys, in the order met; by the value of one alone."""
    found: dict[Any, list[Row]] = {}
    for row in rows:
        key = tuple(row[key] for key in keys)
        found.setdefault(key if len(keys) > 1 else key[0], []).append(row)
    return found


# ---- one prompt after the other ----


def summarise(
    rows: Sequence[Row],
    contenders: Sequence[Contender],
    choices: Mapping[str, Mapping[str, float]] | None = None,
) -> dict[str, dict[str, Figures]]:
    """Returns, by context and contender, what one precision's rows come to.

    Of a contender, speeds are of decoding and by round, over all prompts of the context: a median
    with the least and the greatest. `prefill_ms` is the mean over prompts, its spread that over
    rounds too. `fp32_choices` is what fidelity.py says, if it was asked: where the share is small,
    the weights are another model's.
    """
    found: dict[str, dict[str, Figures]] = {}
    for context, here in _by(sorted(rows, key=lambda row: row["round"]), "context").items():
        own = _by(here, "contender")
        present = [each for each in contenders if each.name in own]
        found[context] = {}
        for each in present:
            last = _by(own[each.name], "round")[max(row["round"] for row in own[each.name])]
            figures = _contender(each, own[each.name])
            plain = [o for o in present if (o.engine, o.mode) == (each.engine, PLAIN)]
            alike = [other for other in present if other.weights == each.weights]
            for key, references in (("same_engine", plain), ("same_weights", alike)):
                if references and references[0] != each:
                    name = references[0].name
                    figures[key] = {"reference": name, **compare(texts(here, name), last)}
                else:
                    figures[key] = None
            figures["fp32_choices"] = (choices or {}).get(context, {}).get(each.name)
            found[context][each.name] = figures
    return found


def _contender(contender: Contender, rows: Sequence[Row]) -> Figures:
    rounds = [*_by(rows, "round").values()]
    prefill = [
        1000 * statistics.mean(prefill_seconds(row["answers"][0]) for row in each)
        for each in rounds
    ]
    speeds = [speed(each, with_first=False) for each in rounds]
    return {
        "engine": contender.engine,
        "mode": contender.mode,
        "weights": contender.weights,
        "ours": contender.is_ours,
        "rounds": len(rounds),
        "tokens": sum(len(row["answers"][0]["tokens"]) for row in rows) / len(rounds),
        "tokens_per_second": {**spread(speeds), "by_round": speeds},
        "prefill_ms": {**spread(prefill), "by_round": prefill},
        "prompt_tokens": statistics.mean(row["prompt_tokens"] for row in rows),
        "peak_rss": max(row["peak_rss"] for row in rows),
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
            pairs = zip(above["by_round"], below["by_round"], strict=True)
            ratios = [ratio(a, b) for a, b in pairs]
            about = {"precision": precision, "context": context, "kind": kind}
            least, greatest = min(ratios), max(ratios)
            found = {"ratio": ratio(above["median"], below["median"]), "least": least}
            rows.append({**about, "ours": ours, "rival": rival, **found, "greatest": greatest})
    return rows


def _best(contenders: Mapping[str, Figures], key: str) -> str | None:
    """Returns the fastest, by its median: of times the least, of speeds the greatest."""
    sign = 1 if key == "prefill_ms" else -1
    return min(contenders, key=lambda name: sign * contenders[name][key]["median"], default=None)


# ---- many clients ----


def summarise_many(rows: Sequence[Row], contenders: Sequence[Contender]) -> list[Figures]:
    """Returns a row of figures for each context, contender and number of clients.

    Tokens a second are of whole answers and by round. Times to the first token and gaps, those
    between parts of one answer, of one token or several, are over all answers of all rounds, in
    milliseconds. `as_alone` compares answers with ours of one at a time.
    """
    names = {each.name: place for place, each in enumerate(contenders)}
    found = []
    for context, here in _by(rows, "context").items():
        here = sorted(here, key=lambda row: (names[row["contender"]], row["clients"], row["round"]))
        cells = _by(here, "contender", "clients")
        alone = texts(here, BEFORE)
        for (name, clients), own in cells.items():
            before = cells.get((BEFORE, clients), [])
            gains = [ratio(speed([a]), speed([b])) for a, b in zip(own, before, strict=False)]
            answers = [answer for row in own for answer in row["answers"]]
            firsts = [prefill_seconds(answer) for answer in answers]
            gaps = [
                after - earlier
                for answer in answers
                for (earlier, _), (after, _) in zip(
                    answer["parts"], answer["parts"][1:], strict=False
                )
            ]
            found.append(
                {
                    "context": context,
                    "contender": name,
                    "weights": contenders[names[name]].weights,
                    "ours": name.startswith(OURS),
                    "clients": clients,
                    "answers": len(answers),
                    "tokens_per_second": spread([speed([row]) for row in own]),
                    "first_ms": {"median": quantile(firsts, 50), "p95": quantile(firsts, 95)},
                    "gap_ms": gap_figures(gaps),
                    "gain": spread(gains) if gains else None,
                    "as_alone": compare(alone, own),
                    "peak_rss": max(row["peak_rss"] for row in own),
                }
            )
    return found


def gap_figures(seconds: Sequence[float]) -> dict[str, float]:
    """Returns the median, the 99th percentile and the longest of gaps, in milliseconds."""
    percents = {"median": 50, "p99": 99, "longest": 100}
    return {name: quantile(seconds, percent) for name, percent in percents.items()}


def quantile(seconds: Sequence[float], percent: int) -> float:
    """Returns a percentile in milliseconds; 0 of none."""
    if not seconds:
        return 0.0
    if percent == 100 or len(seconds) == 1:
        return 1000 * max(seconds)
    return 1000 * statistics.quantiles(seconds, n=100, method="inclusive")[percent - 1]


def best_of_many(rows: Sequence[Figures]) -> list[Figures]:
    """Returns, by context and clients, our lanes over the rivals' fastest and over no drafting."""
    found = []
    for (context, clients), here in _by(rows, "context", "clients").items():
        speeds = {row["contender"]: row["tokens_per_second"]["median"] for row in here}
        if (lanes := speeds.get(f"{OURS}, {LANES}")) is None:
            continue
        others = {name: each for name, each in speeds.items() if not name.startswith(OURS)}
        rival = max(others, key=others.__getitem__, default=None)
        plain = speeds.get(f"{OURS}, {LANES}, {PLAIN}")
        found.append(
            {
                "context": context,
                "clients": clients,
                "rival": rival,
                "over_rival": None if rival is None else ratio(lanes, others[rival]),
                "over_plain": None if plain is None else ratio(lanes, plain),
            }
        )
    return found
