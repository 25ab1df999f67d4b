"""The parts of tools/gpu/check.py that ask how fast it is: drafters, and passes by their nodes."""

from collections.abc import Sequence

import spec_runtime
from spec_runtime.bundle import manifest as bundles
from spec_runtime.measure import bench
from spec_runtime.measure.prompts import BenchPrompt
from tools.gpu.job import Check, contenders, label
from tools.gpu.report import Findings, TableRow
from tools.measure.step_costs import holding, pass_ms


def race(
    engines: Sequence[spec_runtime.Engine], prompts: Sequence[BenchPrompt], max_new_tokens: int
) -> list[bench.BenchReport]:
    """Returns a report for each engine, of a second time: the first captures all shapes."""
    bench.run(engines, prompts, max_new_tokens)
    reports = bench.run(engines, prompts, max_new_tokens)
    if not reports[0].pairs:
        raise ValueError("got no prompt that fits the context")
    return reports


def bench_all(check: Check, found: Findings) -> None:
    for opened in check.opened:
        _bench(check, found, opened)


def _bench(check: Check, found: Findings, opened: bundles.Bundle) -> None:
    """Runs all ways of drafting in turns, against plain decoding on the same backend."""
    ready: dict[str, spec_runtime.Engine] = {}
    for name in ("none", *contenders(opened)):
        engine = found.attempt(f"{label(opened)}, {name}", check.engine, opened, name)
        if engine is not None:
            ready[name] = engine
    reports = found.attempt(
        label(opened), race, [*ready.values()], check.prompts, check.sizes.bench_tokens
    )
    if reports is None:
        return
    for engine, report in zip(ready.values(), reports, strict=True):
        figures = bench.summarise(report)["overall"]
        found.add(
            {
                "bundle": label(opened),
                "drafter": engine.drafter,
                "accepted length": figures["accepted_length"],
                "nodes": 1 + figures["nodes_per_step"],
                "tokens/s": figures["tokens_per_second"],
                "speed-up": figures["speedup"],
                "identical": figures["identical"],
                "outside engines": figures["host_share"],
            }
        )
    rows = [row for row in found.tables["measured"] if row["drafter"] != "none"]
    best = max(rows, key=lambda row: row["speed-up"] or 0.0, default=None)
    if best is not None:
        found.figure = (
            f"{best['drafter']} {best['speed-up']:.2f} times plain decoding, "
            f"{best['tokens/s']:.0f} tokens/s, accepted length {best['accepted length']:.2f}"
        )
    found.note = "plain decoding's own speed-up is noise; outside engines: a share of decoding"


def verify(check: Check, found: Findings) -> None:
    """Times a pass of the target over n nodes, against one over a single node."""
    for opened in check.opened:
        target = check.engine(opened, "none").target
        row: TableRow = {"bundle": label(opened), "context": check.sizes.context}
        with holding(target, check.sizes.context):
            for n in check.sizes.widths:
                row[f"n = {n}"] = pass_ms(target, n, check.sizes.repeats)
        first, *others = (row[f"n = {n}"] for n in check.sizes.widths)
        found.add(row | {"most / one": max(others) / first})
        ratios = (f"verify({n}) {row[f'n = {n}'] / first:.2f}" for n in check.sizes.widths[1:])
        found.figure = f"one node {first:.3f} ms; over it {', '.join(ratios)}"
    found.note = "ms of a pass after so many tokens, with the copies and the wait in it"
