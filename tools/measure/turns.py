"""Lets cases decode the same prompts in turns, and sums up what each of them gave.

A case is an engine and options of its calls. Whose turn comes first rotates from prompt to prompt,
so that a machine that slows down slows all of them. A round gives one ratio of tokens a second to
those of another case in the same round; of several rounds the median, the least and the greatest
are told.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from spec_runtime.engine import Engine
from spec_runtime.loop.result import GenerationResult
from spec_runtime.loop.stats import Stats, ratio
from spec_runtime.sampling import SamplingOptions
from tools.figures import spread

PLAIN = "plain"
Runs = dict[str, list[list[GenerationResult]]]  # by case, round and prompt
GREEDY: SamplingOptions = {}


class Case(NamedTuple):
    engine: Engine
    options: SamplingOptions = GREEDY


def run(
    cases: Mapping[str, Case],
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    rounds: int = 1,
) -> Runs:
    """Returns the answers of each case; above temperature 0 each prompt has a seed of its own."""
    names = list(cases)
    runs: Runs = {name: [[] for _ in range(rounds)] for name in names}
    for engine in {id(case.engine): case.engine for case in cases.values()}.values():
        engine.generate([*prompts[0]], max_new_tokens=8, reuse=False)  # pages in weights, buffers
    for number in range(rounds):
        for i, ids in enumerate(prompts):
            first = (number + i) % len(names)
            for name in names[first:] + names[:first]:
                engine, options = cases[name]
                asked: Any = {"seed": i, **options, "max_new_tokens": max_new_tokens}
                runs[name][number].append(engine.generate([*ids], reuse=False, **asked))
    return runs


def figures(
    runs: Runs, name: str, over: str = PLAIN, members: Sequence[int] | None = None
) -> dict[str, Any]:
    """Returns what a case gave over all rounds, of some of the prompts or of all.

    Speeds are tokens a second of decoding, without prefill; `speedup` is over those of another
    case. Accepted length is tokens per verify step, bonus included.
    """
    total = Stats.total(stats for each in runs[name] for stats in _stats(each, members))
    return {
        "tokens": total.committed_tokens,
        "steps": total.steps,
        "nodes": 1 + ratio(total.drafted_tokens, total.steps),
        "accepted_length": total.accepted_length,
        "drafted_share": ratio(total.drafted_steps, total.steps),
        "draft_ms": 1000 * ratio(total.timings["draft"], total.steps),
        "verify_ms": 1000 * ratio(total.timings["verify"], total.steps),
        "tokens_per_second": spread(speeds(runs, name, members=members)),
        "speedup": spread(ratios(runs, name, over, members=members)),
    }


def speed(stats: Stats) -> float:
    """Returns the tokens a second of decoding; 1 where nobody had any to decode."""
    return stats.tokens_per_second or 1.0


def speeds(
    runs: Runs,
    name: str,
    speed: Callable[[Stats], float] = speed,
    members: Sequence[int] | None = None,
) -> list[float]:
    """Returns a case's speed in each round."""
    return [speed(Stats.total(_stats(each, members))) for each in runs[name]]


def ratios(
    runs: Runs,
    name: str,
    over: str,
    speed: Callable[[Stats], float] = speed,
    members: Sequence[int] | None = None,
) -> list[float]:
    """Returns how many times as fast as another case a case was in each round."""
    both = (speeds(runs, each, speed, members) for each in (name, over))
    return [a / b for a, b in zip(*both, strict=True)]


def identical(runs: Runs, name: str, expected: str = PLAIN) -> float:
    """Returns the share of the first round's answers that are those of another case."""
    same = [
        a.token_ids == b.token_ids for a, b in zip(runs[name][0], runs[expected][0], strict=True)
    ]
    return sum(same) / len(same)


def _stats(results: Sequence[GenerationResult], members: Sequence[int] | None) -> list[Stats]:
    return [results[i].stats for i in (range(len(results)) if members is None else members)]
