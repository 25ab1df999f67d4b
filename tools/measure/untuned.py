"""Measures whether drafting is safe without `tune`: what it gives over plain decoding with the
costs of a first use, beside the bundle's own trees and what `tune` finds.

    python -m tools.measure.untuned --prompts spec_bench.jsonl --bundle DIR DIR --json OUT

For each bundle and drafter, short prompts, the same at temperature 1 with a seed each, and long
ones are decoded in turns: plainly, with the bundle's trees (as --no-profile), as a first load
leaves them, and with --tune as `tune` does. All answers have --max-new-tokens at most. Speeds are
those of decoding, without prefill; "seconds" is what the first load measured for.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import spec_runtime
from spec_runtime.bundle import manifest as bundles
from spec_runtime.engine import Engine
from spec_runtime.measure import tune
from spec_runtime.measure.prompts import read_prompts
from spec_runtime.pace import profile as profiles
from tools.docs.render import shown
from tools.docs.rows import untuned_rows
from tools.figures import asked, command_line, manifest_of, parse, run, write
from tools.measure import turns
from tools.measure.compare_rivals import contexts_of
from tools.measure.turns import PLAIN, Case

COLUMNS = ("bundle's trees", "first use", "tuned")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the figures of all bundles, drafters and kinds of prompt."""
    rows = [
        row
        for folder in args.bundle
        for drafter in args.drafter
        for row in _rows(args, folder, drafter)
    ]
    used = {prompt for row in rows for prompt in row.pop("ids")}
    prompts = [each for each in read_prompts(args.prompts) if str(each.id) in used]
    return write(args.json, {"rows": rows}, prompts=prompts, **asked(args))


def _rows(args: argparse.Namespace, folder: Path, drafter: str) -> Iterator[dict[str, Any]]:
    """Yields what each kind of prompt gives with one drafter of one bundle."""
    with _cache():
        plain = spec_runtime.load(folder, "none", args.threads)
        engines = {PLAIN: plain, COLUMNS[0]: _load(args, folder, drafter, profile=False)}
        times = [time.perf_counter()]
        for _ in range(2):  # the second finds what the first measured
            engines[COLUMNS[1]] = _load(args, folder, drafter)
            times.append(time.perf_counter())
        seconds = (times[1] - times[0]) - (times[2] - times[1])
        if args.tune:
            _tune(args, folder, engines[COLUMNS[0]])
            engines[COLUMNS[2]] = _load(args, folder, drafter)
        manifest = manifest_of(folder)
        for context in contexts_of(args, plain.tokenizer):
            prompts = [*context.prompts.values()]
            for temperature in (0.0, 1.0) if context.name == "short" else (0.0,):
                cases = {
                    name: Case(engine, {"temperature": temperature})
                    for name, engine in engines.items()
                }
                runs = turns.run(cases, prompts, args.max_new_tokens, args.rounds)
                found = {name: turns.figures(runs, name) for name in runs}
                kind = f"{context.name} at temperature 1" if temperature else context.name
                yield {
                    "bundle": manifest.name,
                    "precision": manifest.target.precision,
                    "drafter": engines[COLUMNS[0]].drafter,
                    "prompts": kind,
                    "seconds": seconds,
                    "plain_tokens_per_second": found.pop(PLAIN)["tokens_per_second"]["median"],
                    "engines": found,
                    "ids": [*context.prompts],
                }


def _load(args: argparse.Namespace, folder: Path, drafter: str, profile: bool = True) -> Engine:
    return spec_runtime.load(
        folder, None if drafter == "shipped" else drafter, args.threads, profile=profile
    )


def _tune(args: argparse.Namespace, folder: Path, engine: Engine) -> None:
    """Keeps what `tune` finds with its own prompts."""
    opened = bundles.read(folder, verify=False)
    entry = opened.manifest.entry(engine.drafter)
    key = profiles.key_of(opened, engine.drafter, args.threads)
    prompts = [engine.encode(prompt) for prompt in tune.PROMPTS]
    calibration = None if entry is None else entry.calibration
    profiles.write(tune.tune(engine, prompts, key, calibration).profile)


@contextmanager
def _cache() -> Iterator[None]:
    """Gives the block a cache folder of its own, so that each bundle is opened for the first
    time."""
    before = os.environ.get("XDG_CACHE_HOME")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        try:
            yield
        finally:
            if before is None:
                del os.environ["XDG_CACHE_HOME"]
            else:
                os.environ["XDG_CACHE_HOME"] = before


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    found = command_line(
        __doc__, "--prompts", "--max-new-tokens", "--threads", "--json", max_new_tokens=96
    )
    add = found.add_argument
    add("--bundle", type=Path, nargs="+", required=True)
    add("--drafter", nargs="+", default=["prompt_lookup", "shipped"])
    add("--limit", type=int, default=8, help="short prompts, over all categories")
    add("--long-limit", type=int, default=3)
    add("--long-tokens", type=int, default=1500)
    add("--rounds", type=int, default=2)
    add("--tune", action="store_true", help="and as `tune` does")
    return found


def main(words: Sequence[str] | None = None) -> None:
    """Measures as the command line says, and prints the table."""
    rows = measure(parse(parser(), words))["rows"]
    named = ((f"{row['bundle']} {row['precision']}", row) for row in rows)
    print(shown("untuned", untuned_rows(named)))


if __name__ == "__main__":
    run(main)
