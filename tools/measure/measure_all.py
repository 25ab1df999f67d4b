"""Measures all headline results in sequence, at one commit and on a quiet machine.

    python -m tools.measure.measure_all --prompts SPEC_BENCH.jsonl --bundles DIR --results DIR

Missing bundles (DIR/fp32, DIR/int8 and DIR/int4: the demo target with its own drafter) are built
first; with --model FILE, another model's, with the drafter of --drafter-checkpoint if there is one.
Every stage is one command, writes one file of --results and can be run by its name; what it takes
is printed after it and once more at the end. A stage that fails is reported, the others still run,
and the exit code is 1.

The stages follow each other so that `tune` comes before what uses its profile (sweep and
acceptance); `bench`, `lookup` and `spec-bench` do without one. `lookup` is about the shipped
drafter, so that another model has no such stage. `rivals` and `many-clients` install other engines
under runs/rivals; `rivals` and `spec-bench` take an hour or more; these three go on where they were
stopped.
Commit everything first, so that the provenance names a commit without "-dirty". --tiny takes a
prompt or two and a few tokens of each, to see that everything runs; its figures are worth nothing.
"""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tools.figures import command_line, run

PRECISIONS = ("fp32", "int8", "int4")
# Six prompts at fp32 and twelve below keep a sweep of five repeats within six minutes.
TUNED_PROMPTS = {"fp32": 6, "int8": 12, "int4": 12}
LOOKUPS = ("parallelspec+prompt_lookup", "parallelspec", "prompt_lookup")
LOOKUP = "lookup-"  # what the names of their stages begin with
OF_MODELS = ("check", "many-clients", "rivals", "transformers")  # stages that are told the model


@dataclass(frozen=True)
class Sizes:
    """How much each stage decodes: prompts of each subset, prompts in all, and new tokens."""

    per_category: int = 10
    prompts: int = 60
    bench_tokens: int = 128
    audit_tokens: int = 32
    sweep_tokens: int = 64
    repeats: int = 5
    other_prompts: int = 20
    rival_prompts: tuple[int, int] = (8, 4)  # short and long ones
    rival_rounds: int = 3
    clients: tuple[str, ...] = ()  # flags of many_clients.py
    tuned_prompts: int | None = None  # None: as TUNED_PROMPTS says
    contexts: tuple[int, ...] = (200, 1500)  # tokens before a pass
    questions: int | None = None  # of each subset of Spec-Bench; None: all
    checked: tuple[str, ...] = PRECISIONS


FEW = ("--clients", "2", "--long-limit", "0", "--rounds", "1", "--max-new-tokens", "4")
TINY = Sizes(1, 2, 4, 4, 4, 1, 1, (1, 0), 1, FEW, 1, (8,), 1, ("int8",))


@dataclass(frozen=True)
class Stage:
    """One command, the bundle it needs (None: all) and the file it writes.

    A command is a module of tools.measure, or a verb of ``package``; those of spec_export need no
    bundle. Exit codes up to ``worst_code`` are results.
    """

    name: str
    command: tuple[str, ...]
    precision: str | None
    worst_code: int = 0
    package: str = "spec_runtime"

    @property
    def is_tool(self) -> bool:
        return self.command[0].startswith("tools.")

    @property
    def precisions(self) -> tuple[str, ...]:
        """Returns those of the bundles it needs."""
        if self.package == "spec_export":
            return ()
        return PRECISIONS if self.precision is None else (self.precision,)


def stages(prompts: Path, sizes: Sizes) -> list[Stage]:
    """Returns all stages in their order."""
    given = ("--prompts", str(prompts))
    sixty = (*given, "--per-category", str(sizes.per_category))
    tokens = ("--max-new-tokens", str(sizes.bench_tokens))
    short = ("--max-new-tokens", str(sizes.sweep_tokens))
    limit = ("--limit", str(sizes.prompts))
    repeats = ("--repeats", str(sizes.repeats))
    bench = ("bench", *sixty, *tokens, "--no-profile")
    audit = ("audit", *given, *limit, "--max-new-tokens", str(sizes.audit_tokens))
    names = [word for name in LOOKUPS for word in ("--drafter", name)]
    found = [Stage(f"bench-{each}", bench, each) for each in ("fp32", "int8")]
    found += [Stage(f"{LOOKUP}{each}", (*bench, *names), each) for each in ("fp32", "int8")]
    found += [Stage(f"audit-{each}", audit, each, worst_code=1) for each in PRECISIONS]
    found.append(Stage("audit-fp32-strict", (*audit, "--strict"), "fp32", worst_code=1))
    for each in PRECISIONS:
        found.append(Stage(f"tune-{each}", ("tune", *short), each))
        few = ("--limit", str(sizes.tuned_prompts or TUNED_PROMPTS[each]))
        sweep = ("tools.measure.sweep_budgets", *given, *few, *short, *repeats)
        found.append(Stage(f"sweep-{each}", sweep, each))
    contexts = ("--contexts", *map(str, sizes.contexts))
    steps = ("tools.measure.step_costs", "--operators", *repeats, *contexts)
    acceptance = ("tools.measure.compare_acceptance", *given, *limit, *short)
    few = ("--num", str(sizes.other_prompts))
    other = ("tools.measure.compare_with_transformers", *given, *tokens, *few)
    precisions = [word for each in sizes.checked for word in ("--precision", each)]
    found += [
        Stage("steps", steps, None),
        Stage("acceptance-int8", acceptance, "int8"),
        Stage("memory-fp32", ("tools.measure.measure_memory", *short), "fp32"),
        Stage("transformers-fp32", other, "fp32", worst_code=1),
        Stage("check", ("check", *precisions), None, worst_code=1, package="spec_export"),
    ]
    questions: tuple[str, ...] = ("tools.measure.spec_bench", *given, *tokens, "--no-profile")
    if sizes.questions is not None:
        questions += ("--per-category", str(sizes.questions))
    found += [Stage(f"spec-bench-{each}", questions, each) for each in ("fp32", "int8")]
    few_short, few_long = map(str, sizes.rival_prompts)
    field = ("--limit", few_short, "--long-limit", few_long, "--rounds", str(sizes.rival_rounds))
    rivals = ("tools.measure.compare_rivals", *given, *tokens, *field)
    clients = ("tools.measure.many_clients", *given, *sizes.clients)
    found += [Stage(f"many-clients-{each}", clients, each) for each in ("fp32", "int8")]
    return [*found, Stage("rivals", rivals, None)]


def command_of(stage: Stage, bundles: Path, results: Path, model: str | None = None) -> list[str]:
    """Returns the whole command line of a stage, under this interpreter; model None is the demo."""
    first, *words = stage.command
    program = ["-m", first] if stage.is_tool else [*entry(stage.package), first]
    where = ["--bundles", str(bundles)] if stage.precisions else []
    if stage.precision is not None:
        where = ["--bundle", str(bundles / stage.precision)]
    if model is not None and stage.name.startswith(OF_MODELS):
        where += ["--model", model]
    where += ["--json", str(results / f"{stage.name}.json")]
    return [sys.executable, *program, *words, *where]


def entry(package: str) -> list[str]:
    """Returns what runs a package's verbs; the command that provenance records is its name."""
    name = package.replace("_", "-")
    code = f"import sys; sys.argv[0] = {name!r}; from {package}.cli import main; main()"
    return ["-c", code]


def build(
    precision: str, bundles: Path, model: str | None = None, drafter: str | None = None
) -> None:
    """Builds the demo bundle of a precision unless it is there, or that of another model with the
    drafter of this checkpoint."""
    out = bundles / precision
    if (out / "manifest.json").is_file():
        return
    words = ["build", "--precision", precision, "--out", str(out)]
    words += ["--drafter", "parallelspec"] if model is None else ["--model", model]
    words += [] if drafter is None else ["--drafter-checkpoint", drafter]
    begin = time.monotonic()
    subprocess.run([sys.executable, *entry("spec_export"), *words], check=True)
    print(f"== built {precision}: {time.monotonic() - begin:.0f} s", flush=True)


def main(words: list[str] | None = None) -> int:
    parser = command_line(__doc__, "--prompts")
    parser.add_argument("--bundles", type=Path, required=True)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--model", help="folder, GGUF file or hub id of another model")
    parser.add_argument("--drafter-checkpoint", help="a drafter trained for it")
    parser.add_argument("--stages", nargs="+", metavar="NAME", help="these only; default: all")
    parser.add_argument("--tiny", action="store_true", help="a few tokens: does everything run?")
    parser.add_argument("--list", action="store_true", help="print the stages' names and end")
    args = parser.parse_args(words)
    if args.drafter_checkpoint and not args.model:
        parser.error("got --drafter-checkpoint, expected --model with it")
    every = stages(args.prompts, TINY if args.tiny else Sizes())
    if args.model:
        every = [stage for stage in every if not stage.name.startswith(LOOKUP)]
    known = [stage.name for stage in every]
    if args.list:
        print("\n".join(known))
        return 0
    if unknown := set(args.stages or ()) - set(known):
        parser.error(
            f"got stages {', '.join(sorted(unknown))}, expected some of {', '.join(known)}"
        )
    if not args.prompts.is_file():
        parser.error(f"got --prompts {args.prompts}, expected a file of JSON Lines")
    chosen = [stage for stage in every if args.stages is None or stage.name in args.stages]
    args.results.mkdir(parents=True, exist_ok=True)
    for precision in dict.fromkeys(each for stage in chosen for each in stage.precisions):
        build(precision, args.bundles, args.model, args.drafter_checkpoint)
    lines = []
    for stage in chosen:
        print(f"== {stage.name}", flush=True)
        begin = time.monotonic()
        code = subprocess.run(command_of(stage, args.bundles, args.results, args.model)).returncode
        verdict = "" if code == 0 else f", exit code {code}"
        lines.append(f"{stage.name}: {time.monotonic() - begin:.0f} s{verdict}")
        if not 0 <= code <= stage.worst_code:
            lines[-1] += ", FAILED"
        print(f"== {lines[-1]}", flush=True)
    print("\n".join(["", *lines]))
    return int(any(line.endswith("FAILED") for line in lines))


if __name__ == "__main__":
    run(main)
