"""Disturbs build, distill, train, tune and bench, and counts what was lost: nothing, it is hoped.

    python -m tools.ci.faults --kills 1000 --seed 0 --json faults.json

Each scenario is one command on a tiny target. Kills: SIGKILL or SIGTERM at a random moment, two of
three right before a random operation on a file, the others at a random time. Each command also
runs on file systems of several sizes that are too small for it, on some that get full meanwhile, on
one that is mounted read-only, and beside a second process of itself. After each disturbance what
was there before has to be whole; the same command is then run again, and has to make what it makes
undisturbed, and leave no litter.

`--kills` are shared out evenly over the scenarios, which `--scenarios` names (all by default).
`--short` makes the trials of CI in their place: of each scenario but builds, which take several
seconds, a kill right before its last renaming, when all of the new content is there under another
name, and a few of the others. The same seed gives the same moments, though a moment in seconds
depends on the machine. Mounting needs root; without it those trials are skipped and the reason is
printed. Exit code 1 if anything failed.
"""

import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests" / room) for room in ("faults", "export")]

from fault_scenarios import SCENARIOS, Shop  # noqa: E402  (tests are no package)
from fault_trials import Disturber, Trial, why_no_mounts  # noqa: E402

from spec_runtime.errors import UserError  # noqa: E402
from tools.figures import command_line, run, write  # noqa: E402

SHARES_OF_DISK = (0.02, 0.3, 0.6, 0.9)  # room, as shares of what the command writes
SHARES_OF_WORK = (0.2, 0.5, 0.8)  # when the disk gets full under a command
SHARES_OF_RUN = (0.0, 0.0, 0.3, 0.7)  # when the second of two processes starts
PACKAGES = ("torch", "transformers", "safetensors")
NOTE = "a tiny target of its own; not recorded: prompts, bundle"


def trials(
    disturber: Disturber, kills: int, rng: random.Random, has_mounts: bool
) -> Iterator[Callable[[], Trial]]:
    """Yields all trials of one scenario, ready to be called."""
    for _ in range(kills):
        yield lambda: disturber.kill(disturber.random_death(rng))
    if has_mounts:
        for share in SHARES_OF_DISK:
            yield partial(disturber.fill_disk, share)
        for share in SHARES_OF_WORK:
            yield partial(disturber.fill_disk_later, share)
        yield disturber.forbid_writing
    for share in SHARES_OF_RUN:
        yield partial(disturber.run_two, share)


def short_trials(disturber: Disturber, has_mounts: bool) -> Iterator[Callable[[], Trial]]:
    """Yields the trials of one scenario that CI makes."""
    yield disturber.halve
    yield partial(disturber.kill_before, "os.rename ")
    if has_mounts and disturber.scenario.measures:
        yield disturber.forbid_writing
    if disturber.scenario.name == "distill":
        yield partial(disturber.run_two, 0)
        if has_mounts:
            yield partial(disturber.fill_disk_later, 0.3)


def count(done: list[Trial]) -> dict[str, dict[str, dict[str, int]]]:
    """Returns, by kind and scenario, how many trials were made, disturbed and recovered from."""
    table: dict[str, dict[str, dict[str, int]]] = {}
    for trial in done:
        empty = {"tried": 0, "disturbed": 0, "recovered": 0}
        counts = table.setdefault(trial.kind, {}).setdefault(trial.scenario, empty)
        counts["tried"] += 1
        counts["disturbed"] += trial.disturbed
        counts["recovered"] += not trial.problems
    return table


def main(words: list[str] | None = None) -> int:
    parser = command_line(__doc__, "--json")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scenarios", help="names, with commas")
    parser.add_argument("--short", action="store_true", help="the trials of CI, no random ones")
    args = parser.parse_args(words)
    every = [name for name in SCENARIOS if not (args.short and name.startswith("build"))]
    names = args.scenarios.split(",") if args.scenarios else every
    if unknown := set(names) - set(SCENARIOS):
        raise UserError(f"got scenarios {sorted(unknown)}, expected {', '.join(SCENARIOS)}")
    started, done = time.monotonic(), []
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        no_mounts = why_no_mounts(Path(folder) / "mount")
        if no_mounts is not None:
            print(f"skipped: full disks and read-only folders; {no_mounts}")
        shop = Shop.open(Path(folder) / "shop")
        for i, name in enumerate(names):
            kills = args.kills // len(names) + (i < args.kills % len(names))
            disturber = Disturber(SCENARIOS[name](shop), Path(folder))
            rng = random.Random(f"{args.seed} {name}")
            made = trials(disturber, kills, rng, no_mounts is None)
            for trial in short_trials(disturber, no_mounts is None) if args.short else made:
                done.append(trial())
                if done[-1].problems:
                    print(f"FAILED {done[-1]}", flush=True)
    seconds = time.monotonic() - started
    table = count(done)
    for kind, rows in table.items():
        for name, each in rows.items():
            print(f"{kind:10} {name:15} tried {each['tried']:4}  recovered {each['recovered']:4}")
    failures = [str(trial) for trial in done if trial.problems]
    print(f"{len(done)} trials in {seconds:.0f} s, seed {args.seed}, failures: {len(failures)}")
    figures = {
        "seed": args.seed,
        "seconds": round(seconds, 1),
        "skipped": no_mounts,
        "trials": len(done),
        "counts": table,
        "failed": len(failures),
        "failures": failures,
    }
    write(args.json, figures, threads=1, packages=PACKAGES, note=NOTE)
    return int(bool(failures))


if __name__ == "__main__":
    run(main)
