#!/usr/bin/env python3
"""Measures how ONNX Runtime's thread settings change decoding on this CPU.

usage: python -m tools.measure.thread_settings --bundle DIR --prompts FILE.jsonl [--limit 4]
       [--max-new-tokens 64] [--rounds 5] [--json OUT]

The settings say what a pool's threads do when they have nothing to do, and whether target and
drafter have a pool each:

    stop      they spin inside a run and sleep between runs
    none      they never spin
    always    they spin between runs too
    one pool  as "stop", with one pool for all graphs
    pinned    as "stop", each thread on a CPU of its own

They are tried where the engine has a thread for each CPU; the first two also with one thread, with
twice as many threads as CPUs, and beside a process that keeps one CPU busy. Each measurement is a
process of its own, which decodes all prompts plainly and with the bundle's drafter; the settings
take turns in every round. Prints the median of the rounds and their range, in tokens per second of
decoding.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spec_runtime.bundle import manifest as bundle
from spec_runtime.cli.options import write_figures
from spec_runtime.files.writing import require_writable
from spec_runtime.machine import default_threads
from spec_runtime.measure import provenance
from spec_runtime.measure.prompts import read_prompts

SETTINGS = ("stop", "none", "always", "one pool", "pinned")
SPINS, STOPS = "session.intra_op.allow_spinning", "session.force_spinning_stop"
AFFINITIES = "session.intra_op_thread_affinities"
MODES = {"plain": "none", "drafter": None}  # the drafter of each
BUSY = "while True: pass"


@dataclass(frozen=True)
class Case:
    """Where settings are compared: an engine's threads, and busy processes beside it."""

    threads: int
    neighbours: int
    settings: tuple[str, ...]


def cases(cpus: int) -> list[Case]:
    """Returns what is measured on so many CPUs."""
    few = SETTINGS[:2]
    found = [Case(cpus, 0, SETTINGS), Case(2 * cpus, 0, few), Case(cpus, 1, few)]
    if cpus > 1:
        found += [Case(1, 0, few), Case(max(1, cpus - 1), 1, few)]
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bundle", type=Path)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", nargs=2, metavar=("SETTING", "THREADS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.worker:
        print(json.dumps(decoded(arguments, arguments.worker[0], int(arguments.worker[1]))))
        return
    if arguments.json:
        require_writable(arguments.json)
    folder = arguments.bundle or bundle.find()
    prompts = read_prompts(arguments.prompts, arguments.limit)
    figures: dict[str, Any] = {
        "provenance": provenance.collect(
            prompts_file=arguments.prompts,
            prompts=prompts,
            manifest=bundle.read(folder, verify=False).manifest,
        ),
        "precision": bundle.read(folder, verify=False).manifest.target.precision,
        "cpus": default_threads(),
        "prompts": len(prompts),
        "rounds": arguments.rounds,
        "max_new_tokens": arguments.max_new_tokens,
        "rows": [row for case in cases(default_threads()) for row in measured(case, arguments)],
    }
    if arguments.json:
        write_figures(arguments.json, figures)


def measured(case: Case, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields a row of figures for each setting of the case, and prints it."""
    own = ["--prompts", str(arguments.prompts), "--limit", str(arguments.limit)]
    own += ["--max-new-tokens", str(arguments.max_new_tokens)]
    if arguments.bundle:
        own += ["--bundle", str(arguments.bundle)]
    rates: dict[str, list[dict[str, float]]] = {setting: [] for setting in case.settings}
    with busy_processes(case.neighbours):
        for _ in range(arguments.rounds):
            for setting in case.settings:
                command = [
                    sys.executable,
                    "-m",
                    "tools.measure.thread_settings",
                    *own,
                    "--worker",
                    setting,
                    str(case.threads),
                ]
                done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
                rates[setting].append(json.loads(done.stdout))
    for setting, found in rates.items():
        row: dict[str, Any] = {
            "threads": case.threads,
            "neighbours": case.neighbours,
            "setting": setting,
        }
        for mode in MODES:
            values = [each[mode] for each in found]
            row[mode] = {
                "median": statistics.median(values),
                "least": min(values),
                "greatest": max(values),
            }
        shown = "  ".join(
            f"{mode} {row[mode]['median']:.1f} "
            f"({row[mode]['least']:.1f} to {row[mode]['greatest']:.1f})"
            for mode in MODES
        )
        beside = f", beside {case.neighbours} busy" if case.neighbours else ""
        print(f"{case.threads} threads{beside}, {setting}: {shown} tokens/s", flush=True)
        yield row


@contextmanager
def busy_processes(number: int) -> Iterator[None]:
    """Keeps so many CPUs busy while the block runs."""
    processes = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(number)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def decoded(arguments: argparse.Namespace, setting: str, threads: int) -> dict[str, float]:
    """Returns the tokens per second of both ways to decode, in this process."""
    import_with(setting, threads)
    import spec_runtime

    prompts = read_prompts(arguments.prompts, arguments.limit)
    folder = arguments.bundle or bundle.find()
    opened = spec_runtime.load(folder, threads=threads, profile=False, verify=False)
    rates = {}
    for mode, drafter in MODES.items():
        engine = opened if drafter is None else opened.with_drafter(drafter)
        engine.generate(prompts[0].content, max_new_tokens=8)  # warms up
        tokens, seconds = 0, 0.0
        for prompt in prompts:
            result = engine.generate(
                prompt.content, max_new_tokens=arguments.max_new_tokens, ignore_eos=True
            )
            tokens += len(result.token_ids) - 1
            seconds += result.stats.decode_seconds
        rates[mode] = tokens / seconds
    return rates


def import_with(setting: str, threads: int) -> None:
    """Makes all sessions of this process open with the setting."""
    from spec_runtime.backends.session import ort  # sends no telemetry, see there

    entries = {SPINS: str(int(setting != "none")), STOPS: str(int(setting != "always"))}
    if setting == "pinned" and threads > 1:  # of the pool's own threads, counted from 1
        entries[AFFINITIES] = ";".join(str(cpu + 1) for cpu in range(1, threads))
    if setting == "one pool":
        ort.set_global_thread_pool_sizes(threads, 1)
    ort.set_default_logger_severity(3)  # it would warn of each entry that is set twice
    open_session = ort.InferenceSession

    def open_with(path: str, options: Any, *others: Any, **more: Any) -> Any:
        for name, value in entries.items():
            options.add_session_config_entry(name, value)
        options.use_per_session_threads = setting != "one pool"
        return open_session(path, options, *others, **more)

    ort.InferenceSession = open_with


if __name__ == "__main__":
    main()
