"""Checks in the first ten minutes on a GPU machine that everything opens and loses nothing, and how
fast it is at the shape of a large model.

    python -m tools.gpu.check --out DIR [--minutes 10] [--parts NAME …]
        the demo and its ParallelSpec, inflated to Llama-3-8B's shape (--small: to 0.5 B)
    python -m tools.gpu.check --out DIR --bundle DIR [DIR …] [--prompts FILE.jsonl]
    python -m tools.gpu.check --out DIR --toy --dry-run --model DIR --drafter DIR [--device cpu]

Parts, the most valuable first:

environment    GPU, driver, versions, providers, which of CUDA's libraries are missing
bundle         reads the bundles and checks their hashes, or inflates a small target to a large one
               that says the same, see inflate.py
losslessness   64 tokens of every drafter, greedy and with a seed, against plain decoding; this and
               its logits against what the small target says by transformers
verify         milliseconds of a pass over n nodes, and over one
bench          the shipped drafter, then all others: accepted length, tokens/s, speed-up
lanes          several prompts that share passes: same tokens as alone, ratio of speeds
kernels        a copy, a chain of kernels, ScatterND by row and by value
torch          transformers on the same weights: eager, prompt lookup, torch.compile
genai          onnxruntime-genai on the same weights

Each part is a process of its own under its own time limit: one that hangs is killed, and one that
crashes takes no other with it. One line a part goes to stdout: verdict, seconds, key figure.
results.json in --out is written anew after each part, and log.txt has what the parts printed. The
exit code is 1 if a part failed (something did not open, a number is off, a crash, a time-out), 2 if
the command line does not fit, else 0.

carry.py packs what must be carried to a machine without a network, see docs/deploy/index.md.
--dry-run judges no numbers: it shows, with CUDA's libraries stood in for, that each part runs to
its end and writes its results. --device cpu judges them. --toy takes tiny sizes.

This file and report.py import only the standard library, so that results are written even where
packages are broken.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tools.gpu import report
from tools.gpu.report import FAILED, TableRow, left_out

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = ROOT / "spec_export/assets/reference_prompts.jsonl"
PART = ["-m", "tools.gpu.part"]
# What runs in which order, and the seconds after which a part is killed. A part begins no further
# piece after two thirds of them.
SECONDS = {
    "environment": 40.0,
    "bundle": 240.0,
    "losslessness": 120.0,
    "verify": 40.0,
    "bench": 180.0,
    "lanes": 90.0,
    "kernels": 60.0,
    "torch": 120.0,
    "genai": 150.0,
}
NEEDS_BUNDLE = ("losslessness", "verify", "bench", "lanes", "torch", "genai")
MIN_SECONDS = 10.0  # with less, a part is not begun


@dataclass
class Job:
    """Runs parts in `work`, in processes with this environment, and keeps their entries.

    `options` are what the parts read of the command line. `carried` is what parts hand on to later
    ones.
    """

    work: Path
    out: Path
    environment: dict[str, str]
    options: TableRow
    carried: TableRow = field(default_factory=dict)

    def run(self, name: str, seconds: float) -> TableRow:
        """Runs a part for at most `seconds`; returns its entry, with all that went wrong."""
        begin = time.monotonic()
        asked, result = self.work / f"{name}.asked.json", self.work / f"{name}.json"
        asked.write_text(
            json.dumps({**self.options, "part": name, "seconds": seconds, "carried": self.carried})
        )
        command = [sys.executable, *PART, str(asked), str(result)]
        with (self.out / "log.txt").open("ab") as log:
            log.write(f"\n==== {name} ====\n".encode())
            log.flush()
            ended = run_limited(command, self.environment, seconds, log.fileno())
        if ended is not None:  # a missing package, for instance, is named there
            text = (self.out / "log.txt").read_text(encoding="utf-8", errors="replace")
            ended += f"; the last line of log.txt: {text.splitlines()[-1]:.200}"
        entry, doing = left_out(""), ""
        entry["missing"] = []
        if result.exists():
            answer = json.loads(result.read_text(encoding="utf-8"))
            entry, doing = answer["entry"], answer["doing"]
            self.carried.update(answer["carried"])
        if ended:
            entry["failures"].append(f"{doing}: {ended}" if doing else ended)
            entry["status"] = FAILED
        entry["seconds"] = round(time.monotonic() - begin, 2)
        return entry


def run_limited(
    command: Sequence[str], environment: dict[str, str], seconds: float, log: int
) -> str | None:
    """Runs a command; returns None if it exits with 0, else how it ended, in words.

    Whatever the command has started is killed with it at the end of its time.
    """
    process = subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, process_group=0
    )
    try:
        code = process.wait(seconds)
    except subprocess.TimeoutExpired:
        return f"was still running after {seconds:.0f} s and was killed"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    if code < 0:
        return f"the process was ended by {signal.Signals(-code).name}"
    return f"the process ended with exit code {code}" if code else None


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line; ends the process with exit code 2 if it does not fit."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--bundle", type=Path, nargs="+", default=[])
    parser.add_argument("--prompts", type=Path, default=PROMPTS)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--parts", nargs="+", choices=SECONDS, default=list(SECONDS))
    parser.add_argument("--model", help="inflated in place of the demo")
    parser.add_argument("--drafter", help="the model's ParallelSpec")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--dry-run", action="store_true")
    arguments = parser.parse_args(words)
    if arguments.toy and not (arguments.bundle or (arguments.model and arguments.drafter)):
        parser.error("got --toy, expected --bundle too, or --model and --drafter")
    for path in arguments.bundle:
        if not (path / "manifest.json").is_file():
            parser.error(f"{path}: no manifest.json here, expected a bundle")
    if not arguments.prompts.is_file():
        parser.error(f"got --prompts {arguments.prompts}, expected a file")
    if not arguments.minutes > 0:
        parser.error(f"got --minutes {arguments.minutes:g}, expected more than 0")
    try:
        arguments.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"cannot write to --out: {error}")
    return arguments


def main(words: Sequence[str] | None = None) -> int:
    """Reads the command line and runs the parts; returns the exit code."""
    arguments = parse(words)
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="specsplit-gpu-check-") as folder:
        options = {
            "command": sys.argv,
            "bundles": [str(path.resolve()) for path in arguments.bundle],
            "prompts": str(arguments.prompts.resolve()),
            "device": arguments.device,
            **{
                key: vars(arguments)[key] for key in ("toy", "small", "dry_run", "model", "drafter")
            },
            "work": folder,
        }
        places = [*filter(None, [os.environ.get("PYTHONPATH")]), str(ROOT)]
        own = {"PYTHONPATH": os.pathsep.join(places)}
        own |= {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
        (arguments.out / "log.txt").write_bytes(b"")
        if arguments.dry_run:
            print("Dry run: no number below is judged, or says anything of a GPU.", flush=True)
        job = Job(Path(folder), arguments.out, {**os.environ, **own}, options)
        return run_parts(job, arguments.parts, begin, 60 * arguments.minutes)


def run_parts(job: Job, asked_for: Sequence[str], begin: float, seconds: float) -> int:
    """Runs the parts in their order and writes the results after each; returns the exit code.

    The bundle is made or read in any case. A part gets its own seconds, or the time that is left.
    """
    entries = {name: left_out("the run ended before it") for name in SECONDS}
    figures: TableRow = {key: job.options[key] for key in ("toy", "small", "dry_run", "device")}
    figures["parts"] = entries
    for name, limit in SECONDS.items():
        left = begin + seconds - time.monotonic()
        if name not in asked_for and not (name == "bundle" and {*asked_for} & {*NEEDS_BUNDLE}):
            entries[name] = left_out("not asked for")
        elif left < min(MIN_SECONDS, limit):
            entries[name] = left_out(f"the {seconds / 60:g} minutes were over")
        elif name in NEEDS_BUNDLE and not job.carried.get("bundles"):
            entries[name] = left_out("there is no bundle")
        else:
            entries[name] = job.run(name, min(limit, left))
        failed = any(entry["status"] == FAILED for entry in entries.values())
        figures |= {
            "measured_on": job.carried.get("measured_on", "unknown machine"),
            "bundles": job.carried.get("labels", []),
            "provenance": job.carried.get("provenance"),
            "exit_code": int(failed),
            "seconds": round(time.monotonic() - begin, 2),
        }
        report.write_whole(job.out / "results.json", report.as_json(figures))
        if name in asked_for or entries[name]["status"] == FAILED:
            print(report.verdict(name, entries[name]), flush=True)
    return int(figures["exit_code"])


if __name__ == "__main__":
    # So that whoever ends the command ends the part in hand, too.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    sys.exit(main())
