"""Benchmark: plain and speculative decoding of one bundle, prompt by prompt, and what they cost.

It reads prompt files, runs two engines over one target and sums their statistics as the metrics
define; it does not know terminals (``cli/bench.py``) nor how an engine decodes.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from spec_runtime.measure import audit
from spec_runtime.measure.prompts import BenchPrompt
from spec_runtime.stats import Stats

if TYPE_CHECKING:
    from spec_runtime import Engine, GenerationResult
    from spec_runtime.sampling import SamplingOptions


@dataclass(frozen=True)
class Pair:
    """One prompt decoded both ways; ``divergence`` is None where the tokens are the same."""

    prompt: BenchPrompt
    plain: "GenerationResult"
    speculative: "GenerationResult"
    divergence: audit.Divergence | None


@dataclass
class BenchReport:
    """What was run, and the prompts that did not fit: {"prompt", "reason"}."""

    pairs: list[Pair] = field(default_factory=list)
    skipped: list[dict[str, Any]] = field(default_factory=list)


def run(
    engines: Sequence["Engine"],
    prompts: Iterable[BenchPrompt],
    max_new_tokens: int,
    on_prompt: Callable[[], None] = lambda: None,
    on_skip: Callable[[str], None] = lambda reason: None,
    *,
    system: str | None = None,
    sampling: "SamplingOptions | None" = None,
) -> list[BenchReport]:
    """Decode each prompt plainly and with each engine; ``on_prompt`` after each prompt.

    ``sampling`` (none = greedy) holds for all; plain decoding always draws from the target, since
    typical acceptance alone would make it greedy.

    The engines share one target; there is a report for each. Who goes first rotates, so that nobody
    always meets the warmer machine. A prompt longer than the context is skipped, with its reason to
    ``on_skip``.
    """
    contenders = [engines[0].with_drafter("none"), *engines]
    reports = [BenchReport() for _ in engines]
    options: SamplingOptions = {**(sampling or {}), "max_new_tokens": max_new_tokens}
    plain_options: SamplingOptions = {**options, "acceptance": "target_sampling"}
    num_done = 0
    for prompt in prompts:
        try:
            prompt_ids = engines[0].encode(prompt.content, system=system)
        except ValueError as error:
            for report in reports:
                report.skipped.append({"prompt": prompt.id, "reason": str(error)})
            on_skip(f"prompt {prompt.id} skipped: {error}")
            on_prompt()
            continue
        if num_done == 0:  # page in weights and buffers outside the timing
            for each in contenders:
                each.generate(prompt_ids, max_new_tokens=8, reuse=False)
        first = num_done % len(contenders)
        order = [*range(first, len(contenders)), *range(first)]
        results = {
            i: contenders[i].generate(prompt_ids, reuse=False, **(options if i else plain_options))
            for i in order
        }
        plain = results[0]
        for i, report in enumerate(reports, 1):
            divergence = audit.compare(
                prompt.id, prompt_ids, plain.token_ids, results[i].token_ids, engines[0].target
            )
            report.pairs.append(Pair(prompt, plain, results[i], divergence))
        num_done += 1
        on_prompt()
    return reports


def summarise(report: BenchReport) -> dict[str, Any]:
    """``overall`` and ``categories`` (by name, in the order met), each as ``_summary`` gives."""
    categories: dict[str, list[Pair]] = {}
    for pair in report.pairs:
        categories.setdefault(pair.prompt.category, []).append(pair)
    return {
        "overall": _summary(report.pairs),
        "categories": {name: _summary(pairs) for name, pairs in categories.items()},
        "skipped": report.skipped,
    }


def _summary(pairs: Sequence[Pair]) -> dict[str, Any]:
    plain = Stats.total(pair.plain.stats for pair in pairs)
    speculative = Stats.total(pair.speculative.stats for pair in pairs)
    divergences = [pair.divergence for pair in pairs if pair.divergence is not None]
    return {
        "prompts": len(pairs),
        "tokens_per_second": speculative.tokens_per_second,
        "plain_tokens_per_second": plain.tokens_per_second,
        "speedup": _ratio(plain.decode_seconds, speculative.decode_seconds),
        "accepted_length": speculative.accepted_length,
        "acceptance_by_depth": speculative.acceptance_by_depth,
        "identical": _ratio(len(pairs) - len(divergences), len(pairs)),
        "divergences": [dataclasses.asdict(divergence) for divergence in divergences],
        "steps": speculative.steps,
        "tokens": speculative.committed_tokens,
        "plain_tokens": plain.committed_tokens,
        "nodes_per_step": _ratio(speculative.drafted_tokens, speculative.steps),
        "prefill_seconds": speculative.prefill_seconds,
        "timings": speculative.timings,
        "draft_ms": 1000 * _ratio(speculative.timings["draft"], speculative.steps),
        "verify_ms": 1000 * _ratio(speculative.timings["verify"], speculative.steps),
        "plain_verify_ms": 1000 * _ratio(plain.timings["verify"], plain.steps),
        "host_share": _host_share(speculative),
        "plain_host_share": _host_share(plain),
    }


def _host_share(stats: Stats) -> float:
    """Share of decoding spent outside engine runs."""
    return _ratio(stats.decode_seconds - stats.engine_seconds, stats.decode_seconds)


def _ratio(a: float, b: float) -> float:
    """a / b, and 0.0 where nothing was measured."""
    return a / b if b else 0.0
