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
under runs/rivals; `rivals` and `spec-bench` take an hour or more.
Commit everything first and let --results lie outside the checkout, so that the provenance of every
stage names a commit without "-dirty".
"""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tools.figures import command_line, run

PRECISIONS = ("fp32", "int8", "int4")
LOOKUP = "lookup-"  # what the names of stages about the shipped drafter begin with
OF_MODELS = ("check", "many-clients", "rivals", "transformers")  # stages that are told the model
# The words that commands share. Six prompts at fp32 and twelve below keep a sweep of five repeats
# within six minutes.
WORDS = {
    "bench": "spec_runtime bench --max-new-tokens 128 --no-profile --prompts {prompts}",
    "audit": "spec_runtime audit --limit 60 --max-new-tokens 32 --prompts {prompts}",
    "compare": "tools.measure.compare",
    "rivals": "tools.measure.compare_rivals",
    "given": "--max-new-tokens 128 --prompts {prompts}",
    "short": "--max-new-tokens 64",
    "some": "--max-new-tokens 64 --prompts {prompts} --limit",
    "looked_up": "--drafter parallelspec+prompt_lookup --drafter parallelspec "
    "--drafter prompt_lookup",
}
FEW = {"fp32": "6", "int8": "12", "int4": "12"}
# The stages in their order: name, which bundles ("all" at once, "none"), the exit code up to which
# there is a result, and the command: a module of tools, or a package and its verb.
STAGES = """
bench-{} | fp32 int8 | 0 | {bench} --per-category 10
lookup-{} | fp32 int8 | 0 | {bench} --per-category 10 {looked_up}
audit-{} | fp32 int8 int4 | 1 | {audit}
audit-{}-strict | fp32 | 1 | {audit} --strict
tune-{} | fp32 int8 int4 | 0 | spec_runtime tune {short}
sweep-{} | fp32 int8 int4 | 0 | {compare} budgets {some} {few} --rounds 5
steps | all | 0 | tools.measure.step_costs --operators --repeats 5 --contexts 200 1500
acceptance-{} | int8 | 0 | {compare} acceptance {some} 60
transformers-{} | fp32 | 1 | {compare} transformers {given} --limit 20
check | none | 1 | spec_export check --precision fp32 --precision int8 --precision int4
spec-bench-{} | fp32 int8 int4 | 0 | {bench}
many-clients-{} | fp32 int8 | 0 | {rivals} many {short} --prompts {prompts}
rivals | all | 0 | {rivals} alone {given} --limit 8 --long-limit 4 --rounds 3
"""
IMPORT = "from {}.cli import main; main()"


class Stage(NamedTuple):
    """One command with the bundles that it needs, and the exit code up to which it has a result."""

    name: str
    precisions: tuple[str, ...]
    words: list[str]
    worst_code: int


def stages(
    prompts: Path, bundles: Path, results: Path, model: str | None = None
) -> Iterator[Stage]:
    """Yields all stages with their whole command lines, under this interpreter; model None is the
    demo, and no other model has stages about the shipped drafter."""
    for line in STAGES.strip().splitlines():
        template, which, worst_code, command = line.split(" | ")
        for precision in ("",) if which in ("all", "none") else which.split():
            name = template.format(precision)
            if model is not None and name.startswith(LOOKUP):
                continue
            text = command.format(**WORDS, few=FEW.get(precision), prompts="{prompts}")
            first, *words = (word.format(prompts=prompts) for word in text.split())
            if first.startswith("tools."):
                program = ["-m", first]
            else:  # the command that provenance records is the package's program
                said = first.replace("_", "-")
                program = ["-c", f"import sys; sys.argv[0] = {said!r}; {IMPORT.format(first)}"]
            where = ["--bundle", str(bundles / precision)] if precision else []
            if which == "all":
                where = ["--bundles", str(bundles)]
            if model is not None and name.startswith(OF_MODELS):
                where += ["--model", model]
            where += ["--json", str(results / f"{name}.json")]
            needed = PRECISIONS if which == "all" else tuple(filter(None, [precision]))
            yield Stage(name, needed, [sys.executable, *program, *words, *where], int(worst_code))


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
    subprocess.run([sys.executable, "-c", IMPORT.format("spec_export"), *words], check=True)
    print(f"== built {precision}: {time.monotonic() - begin:.0f} s", flush=True)


def main(words: list[str] | None = None) -> int:
    parser = command_line(__doc__, "--prompts")
    parser.add_argument("--bundles", type=Path, required=True)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--model", help="folder, GGUF file or hub id of another model")
    parser.add_argument("--drafter-checkpoint", help="a drafter trained for it")
    parser.add_argument("--stages", nargs="+", metavar="NAME", help="these only; default: all")
    parser.add_argument("--list", action="store_true", help="print the stages' names and end")
    args = parser.parse_args(words)
    if args.drafter_checkpoint and not args.model:
        parser.error("got --drafter-checkpoint, expected --model with it")
    every = [*stages(args.prompts, args.bundles, args.results, args.model)]
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
        code = subprocess.run(stage.words).returncode
        verdict = "" if code == 0 else f", exit code {code}"
        lines.append(f"{stage.name}: {time.monotonic() - begin:.0f} s{verdict}")
        if not 0 <= code <= stage.worst_code:
            lines[-1] += ", FAILED"
        print(f"== {lines[-1]}", flush=True)
    print("\n".join(["", *lines]))
    return int(any(line.endswith("FAILED") for line in lines))


if __name__ == "__main__":
    run(main)
