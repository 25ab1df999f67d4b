"""Tries random and damaged inputs of every kind, in processes with limits, and counts outcomes.

python -m tools.ci.fuzz --cases 100000 --seed 1 --json results.json
python -m tools.ci.fuzz --cases 500 --kinds manifest,recipe
python -m tools.ci.fuzz --replay results.json#0

The same seed and number of cases give the same inputs, whatever the number of workers; a digest by
kind shows that they are. Exits with 1 if a case failed: it was neither accepted nor refused
properly. What the kinds try is in tests/fuzz/kinds/.
"""

import argparse
import json
import lzma
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / name) for name in ("", "tests", "tests/export", "tests/fuzz")]

import runner  # noqa: E402 - found on the path above
from cases import FAILED, Outcome  # noqa: E402
from kinds import KINDS  # noqa: E402

from spec_runtime.files.writing import write_atomically  # noqa: E402
from tools.figures import command_line, parse, write  # noqa: E402

PACKAGES = ("hypothesis", "torch", "transformers")
NOTE = "bundles of its own; not recorded: prompts, bundle"
# Kinds of which few cases may all end alike: damaged profiles are measured anew, and most random
# command lines are refused.
ONE_WAY = ("machine profile", "export command line")
MORE = 100  # cases of a kind that tried little


def main(argv: list[str] | None = None) -> int:
    parser = command_line(__doc__, "--json")
    parser.add_argument("--cases", type=int, default=5000, help="in all; kinds have weights")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", help=f"comma-separated, of: {', '.join(KINDS)}")
    parser.add_argument("--workers", type=int, default=2, help="processes at once")
    parser.add_argument("--inputs", type=Path, help="write every input and outcome, as .jsonl.xz")
    parser.add_argument(
        "--both-ways",
        action="store_true",
        help=f"fail if the cases of a kind, and {MORE} more, are all accepted or all refused",
    )
    parser.add_argument("--replay", help="FILE#N: run failure N of a --json file again")
    options = parse(parser, argv)
    if options.replay:
        return _replay(options.replay)
    names = options.kinds.split(",") if options.kinds else list(KINDS)
    if unknown := [name for name in names if name not in KINDS]:
        parser.error(f"got kinds {', '.join(unknown)}, expected some of {', '.join(KINDS)}")
    if options.inputs:
        options.inputs.parent.mkdir(parents=True, exist_ok=True)
    report = _run(options, names)
    alike = _alike_after_more(report, options.workers) if options.both_ways else []
    _print(report)
    for name in alike:
        print(f"all cases of {name} end alike: they try little")
    if options.json:
        figures = write(None, report.as_json(), packages=PACKAGES, note=NOTE)
        # in ASCII, since inputs hold halves of surrogate pairs
        write_atomically(options.json, json.dumps(figures, indent=1) + "\n")
    return 1 if report.failures or alike else 0


def _run(options: argparse.Namespace, names: list[str]) -> runner.Report:
    """Runs the cases; says how far it is, and writes the inputs where asked to."""
    path = options.inputs or os.devnull
    done = 0

    def note(kind: str, case: Any, outcome: Outcome) -> None:
        nonlocal done
        done += 1
        row = {"kind": kind, "case": case, "verdict": outcome.verdict, "cause": outcome.cause}
        inputs.write(json.dumps(row) + "\n")
        if done % 500 == 0:
            print(f"{done} of about {options.cases}: {kind}", file=sys.stderr, flush=True)

    kinds = [KINDS[name] for name in names]
    with lzma.open(path, "wt", preset=1) if options.inputs else open(path, "w") as inputs:
        return runner.run(kinds, options.cases, options.seed, options.workers, note)


def _alike_after_more(report: runner.Report, workers: int) -> list[str]:
    """Tries more of the kinds whose cases all ended alike; returns those of which all still do."""

    def alike() -> list[str]:
        ends = {name: (each.accepted, each.refused) for name, each in report.kinds.items()}
        return [name for name, each in ends.items() if not all(each) and name not in ONE_WAY]

    kinds = [KINDS[name] for name in alike()]
    more = runner.run(kinds, MORE * len(kinds), report.seed + 1, workers)
    report.failures += more.failures
    for name, tally in more.kinds.items():
        for count in ("cases", "accepted", "refused", "failed"):
            both = getattr(report.kinds[name], count) + getattr(tally, count)
            setattr(report.kinds[name], count, both)
    return alike()


def _print(report: runner.Report) -> None:
    print(f"{'kind':22}{'cases':>8}{'accepted':>10}{'refused':>9}{'failures':>10}{'ms each':>9}")
    for name, tally in report.kinds.items():
        each = 1000 * tally.seconds / max(1, tally.cases)
        print(
            f"{name:22}{tally.cases:8}{tally.accepted:10}{tally.refused:9}{tally.failed:10}{each:9.1f}"
        )
    print(
        f"{report.num_cases} cases, {len(report.failures)} failures, seed {report.seed}, "
        f"{report.seconds:.0f} s"
    )
    causes = Counter((failure["kind"], failure["cause"]) for failure in report.failures)
    for (kind, cause), count in causes.most_common(60):
        print(f"{count:6}  {kind}: {cause}")


def _replay(which: str) -> int:
    """Runs one stored failure again and prints what becomes of it."""
    name, _, number = which.rpartition("#")
    failure = json.loads(Path(name).read_text())["failed"][int(number)]
    print(json.dumps(failure["case"], indent=1)[:4000])
    outcome = runner.run_one(KINDS[failure["kind"]], failure["case"])
    print(f"{failure['kind']}: {outcome.verdict} {outcome.cause}\n{outcome.detail}")
    return int(outcome.verdict == FAILED)


if __name__ == "__main__":
    sys.exit(main())
