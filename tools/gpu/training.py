"""Trains the drafters of the comparison tables on a GPU that is lent for minutes at a time.

    python tools/training.py --data A.jsonl.xz B.jsonl --work DIR --send $OUT --minutes 9

Run the same command until it says that nothing is left. Each call goes on where the last one was
stopped, as long as the machine keeps DIR. The stages are

    options     the options of ParallelSpec, 3 M token rows each
    two-best    the two variants of it with the longest simulated drafts, 10 M each
    drafters    all other drafters, 3 M each

Before its minutes are over a call stops the training, which writes a checkpoint, and puts what has
finished and was not sent before into --send: files of at most 15 MiB, as many as one call returns.
Where they arrive, `cat NAME.tar.* | tar -x -C runs` brings back a run's drafter; `spec-export
build --drafter-checkpoint` then makes a bundle with it.

--data takes several files, also .xz, and writes --sequences of their rows, drawn by a fixed seed,
as one file: the features of a row's tokens take 7 KB each on disk. The target comes from the user's
cache, as everywhere; a file that is too large for one transfer can be joined there from parts.
"""

from __future__ import annotations

import argparse
import io
import json
import lzma
import random
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from spec_runtime.files.writing import write_atomically

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "recipes" / "smollm2-135m"
OTHERS = (
    *("eagle", "hydra", "amphista", "medusa", "redrafter", "semi_autoregressive"),
    *("skip_layer", "draft_model"),
)
SHARD_BYTES, MAX_SHARDS = 15 << 20, 4  # of one call
STOP_SECONDS = 30  # what a training takes to write its checkpoint and end
SENT = ("drafter/config.json", "drafter/drafter.safetensors", "effort.json", "curves.csv")


@dataclass(frozen=True)
class Stage:
    """One command, whose runs lie in `folder`; it has ended well where its file `done` is."""

    name: str
    folder: Path
    command: Callable[[], list[str]]  # made when its turn comes, from what earlier stages found

    @property
    def done(self) -> Path:
        return self.folder / "done"


def stages(data: Path, work: Path, rows: float, more_rows: float) -> list[Stage]:
    """Returns the stages in their order; the first builds the feature cache of all."""
    options, best, others = (work / name for name in ("options", "two-best", "drafters"))
    found = options / "results.json"

    def study(folder: Path, count: float, words: Sequence[str]) -> list[str]:
        command = [
            "-m",
            "tools.training.ablations",
            "parallelspec_options",
            *where(folder),
            f"{count:g}",
        ]
        return [*command, "--json", str(folder / "results.json"), *words]

    def where(folder: Path) -> list[str]:
        words = ["--data", str(data), "--cache", str(work / "features"), "--out", str(folder)]
        return [*words, "--set", "train.checkpoint_every=100", "--token-rows"]

    recipes = [str(RECIPES / f"{name}.toml") for name in OTHERS]
    return [
        Stage("options", options, lambda: study(options, rows, ())),
        Stage("two-best", best, lambda: study(best, more_rows, ["--only", *two_best(found)])),
        Stage(
            "drafters",
            others,
            lambda: ["-m", "tools.training.train_drafters", *recipes, *where(others), f"{rows:g}"],
        ),
    ]


def two_best(results: Path) -> list[str]:
    """Returns the labels of the two variants with the longest simulated accepted length."""
    rows = [row for row in json.loads(results.read_text())["variants"] if "error" not in row]
    rows.sort(key=lambda row: row["accepted_length"], reverse=True)
    return [row["variant"] for row in rows[:2]]


def main(words: list[str] | None = None) -> int:
    """Runs stages for the minutes given and sends what has finished; 1 if one has failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, nargs="+", required=True)
    parser.add_argument(
        "--sequences", type=int, help="number of rows taken from the data; default: all"
    )
    parser.add_argument("--work", type=Path, required=True, help="runs and features")
    parser.add_argument("--send", type=Path, required=True, help="where files leave the machine")
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--token-rows", type=float, default=3e6)
    parser.add_argument("--more-token-rows", type=float, default=1e7, help="of the two best")
    parser.add_argument("--stages", nargs="+", help="these only")
    arguments = parser.parse_args(words)
    deadline = time.monotonic() + 60 * arguments.minutes - STOP_SECONDS
    work = arguments.work
    data = work / "answers.jsonl"
    if not data.is_file():
        work.mkdir(parents=True, exist_ok=True)
        write_atomically(data, "".join(rows_of(arguments.data, arguments.sequences)))
    every = stages(data, work, arguments.token_rows, arguments.more_token_rows)
    codes = []
    for stage in every:
        if stage.done.is_file() or stage.name not in (arguments.stages or (stage.name,)):
            continue
        code = run_until(stage.command(), deadline)
        print(f"== {stage.name}: {'stopped' if code is None else f'exit code {code}'}", flush=True)
        if code is None:
            break
        codes.append(code)
        if code == 0:
            write_atomically(stage.done, "")
    left = send(work, arguments.send)
    todo = [stage.name for stage in every if not stage.done.is_file()]
    print(f"== to train: {', '.join(todo) or 'nothing'}; files to send: {left or 'none'}")
    return int(any(codes))


def rows_of(files: Sequence[Path], count: int | None) -> list[str]:
    """Returns the rows of all files, or `count` of them drawn by a fixed seed, in file order."""
    rows: list[str] = []
    for file in files:
        content = file.read_bytes()
        text = (lzma.decompress(content) if file.suffix == ".xz" else content).decode()
        rows += [f"{line}\n" for line in text.split("\n") if line]
    if count is None or count >= len(rows):
        return rows
    return [rows[i] for i in sorted(random.Random(0).sample(range(len(rows)), count))]


def run_until(command: Sequence[str], deadline: float) -> int | None:
    """Runs a tool until it ends, and returns its exit code; None if it was stopped at `deadline`
    (of `time.monotonic`), by SIGTERM first, on which a training writes a checkpoint."""
    if deadline <= time.monotonic():
        return None
    process = subprocess.Popen([sys.executable, *command])
    try:
        return process.wait(deadline - time.monotonic())
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        return None


def send(work: Path, folder: Path) -> int:
    """Puts the results of all stages and finished runs into `folder`, as many as one call returns.

    Returns how many files wait for the next call. `work`/sent.json lists what has left; a run is
    sent once, the results each time.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.tar").write_bytes(
        packed(work, sorted([*work.glob("*/results.json"), *work.glob("*/**/budget.json")]))
    )
    record = work / "sent.json"
    sent: list[str] = json.loads(record.read_text()) if record.is_file() else []
    room, waiting = MAX_SHARDS, 0
    for drafter in sorted(work.glob("*/*/drafter")):
        run = drafter.parent
        name = ".".join(run.relative_to(work).parts)
        if run.name == "first-steps":
            continue
        content = packed(work, [run / part for part in SENT if (run / part).is_file()])
        shards = range(0, len(content), SHARD_BYTES)
        for number, begin in enumerate(shards):
            file = f"{name}.tar.{number:02}"
            if file in sent:
                continue
            if not room:
                waiting += 1
                continue
            (folder / file).write_bytes(content[begin : begin + SHARD_BYTES])
            sent.append(file)
            room -= 1
    write_atomically(record, json.dumps(sent))
    return waiting


def packed(work: Path, files: Sequence[Path]) -> bytes:
    """Returns a tar archive of these files, named as they lie in `work`; the same each time."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        for file in files:
            archive.add(file, str(file.relative_to(work)))
    return content.getvalue()


if __name__ == "__main__":
    sys.exit(main())
