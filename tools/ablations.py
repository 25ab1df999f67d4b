"""Trains the variants of one drafter on the same data and budget, and prints them as one table.

    python tools/ablations.py num_masks --data answers.jsonl --cache FOLDER --out runs/num_masks \\
        --minutes-each 20
    python tools/ablations.py parallelspec_options --data answers.jsonl --cache FOLDER \\
        --out runs/options --token-rows 3e6 --prompts spec_bench.jsonl --bundles bundles/options \\
        --json ablation-parallelspec-options.json
    python tools/ablations.py parallelspec_options --data answers.jsonl --cache FOLDER \\
        --out runs/two-best --token-rows 1e7 --only "Markov, rank 256" "all that pay" \\
        --variant "all that pay: drafter.markov_rank=256,drafter.mask_reads_token=true"

num_masks: ParallelSpec with 1 to 6 masks. parallelspec_options: what ParallelSpec can have besides
its paper's form. amphista: the drafter and the five ablations of its paper. semi_autoregressive:
the networks h_q of its paper. --variant adds combinations.

The feature cache takes no variant's time: with --token-rows, and where variants differ in taps, two
steps of the variant with most taps build it; otherwise the first variant does. A cache with
num_masks' taps, such as tools/train_drafters.py makes, serves all studies but the one of options.
A variant that has finished under --out with the same settings is not trained again, and one that
was stopped goes on (but with --minutes-each, which starts it anew). A variant that fails is
reported and left out, and the exit code is 1. The table goes to the standard output; --json writes
it to a file, with everything else that was measured, after each variant.

With --prompts each trained variant then decodes them with trees of each size in --nodes, without
prompt lookup. That goes on where it was stopped, too. --bundles keeps the target's bundle.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from decoding import Ledger, Task, decode, sizes
from training_runs import (
    BUDGET,
    Place,
    RowBudget,
    build_cache,
    measured,
    row_budget,
    row_count,
    taps_of,
    trained,
    with_variants,
)
from variant_bundles import VariantBundles

import spec_runtime
from spec_export.graphs.quantize import PRECISIONS
from spec_export.training import checkpoint, recipe
from spec_export.training.validate import VALIDATION_BUDGET
from spec_runtime.files.writing import require_writable, sha256, write_atomically
from spec_runtime.measure import provenance
from spec_runtime.measure.prompts import read_prompts

RECIPES = Path(__file__).parents[1] / "recipes" / "smollm2-135m"


@dataclass(frozen=True)
class Study:
    """A recipe, the overrides of each variant by its label, and those that all variants share.

    A variant's own override of a shared key counts.
    """

    recipe: Path
    variants: Mapping[str, tuple[str, ...]]
    shared: tuple[str, ...] = ()


STUDIES = {
    "amphista": Study(
        RECIPES / "amphista.toml",
        {
            "full": (),
            "without auto-embedding": ("drafter.auto_embedding=false",),
            "without position table": ("drafter.position_table=false",),
            "without staged adaptation": ("drafter.staged=none",),
            "one adaptation layer": ("drafter.staged=one",),
            "without sampled token": ("drafter.sampled_token=false",),
        },
    ),
    "num_masks": Study(
        RECIPES / "parallelspec.toml",
        {f"num_masks = {masks}": (f"drafter.num_masks={masks}",) for masks in range(1, 7)},
    ),
    "parallelspec_options": Study(
        RECIPES / "parallelspec.toml",
        {
            "baseline": (),
            "token in mask rows": ("drafter.mask_reads_token=true",),
            "Markov, rank 64": ("drafter.markov_rank=64",),
            "Markov, rank 256": ("drafter.markov_rank=256",),
            "Markov, rank 256, reads hidden": (
                "drafter.markov_rank=256",
                "drafter.markov_reads_hidden=true",
            ),
            "two layers": ("drafter.layers=2",),
            "five taps": ("drafter.taps=[5, 10, 15, 20, 25]",),
            "loss tv": ("drafter.loss=tv",),
            "loss lk": ("drafter.loss=lk",),
            "depth weights by reach": ("drafter.depth_weights=reach",),
            "prompts' rows": ("drafter.prompt_weight=0.5",),
        },
        # The shipped drafter's recipe has what paid.
        shared=("drafter.depth_weights=decay",),
    ),
    "semi_autoregressive": Study(
        RECIPES / "semi_autoregressive.toml",
        {
            "fixed attention": ("drafter.kind=fixed_attention",),
            "LSTM": ("drafter.kind=lstm",),
            "RNN": ("drafter.kind=rnn",),
            "last embedding": ("drafter.kind=transformer", "drafter.layers=0"),
            **{
                f"transformer, {layers} layer{'s' * (layers > 1)}": (
                    "drafter.kind=transformer",
                    f"drafter.layers={layers}",
                )
                for layers in (1, 2, 4, 6)
            },
        },
    ),
}


@dataclass(frozen=True)
class Decoder:
    """Decodes the task with each trained variant, with trees of each size."""

    bundles: VariantBundles
    task: Task
    nodes: Sequence[int]

    def figures(self, drafter: Path) -> dict[str, dict[str, Any]]:
        """Returns the figures by name of size, "8 nodes"; decodes what is not there yet."""
        weights = {"drafter": sha256(drafter / "drafter.safetensors")}
        settings = {**self.task.settings, **weights, "precision": self.bundles.precision}
        ledger = Ledger(drafter.parent / "decoding.json", settings)
        names = {count: f"{count} nodes" for count in self.nodes}
        if ledger.lacks(names.values(), self.task):
            with self.bundles.bundle(checkpoint.load_drafter(drafter)) as folder:
                engine = spec_runtime.load(folder, verify=False, lookup=False, profile=False)
                engines = {names[count]: each for count, each in sizes(engine, self.nodes).items()}
                decode(engines, self.task, ledger)
        return {name: ledger.figures(name) for name in names.values()}


def main(words: list[str] | None = None) -> int:
    """Runs the study that the command line names; returns 1 if a variant failed."""
    parser = _parser()
    arguments = parser.parse_args(words)
    if arguments.json:
        require_writable(arguments.json)
    study = STUDIES[arguments.study]
    path = arguments.recipe or study.recipe
    place = Place(arguments.data, arguments.cache, arguments.out)
    try:
        variants = chosen(study.variants, arguments.variant, arguments.only)
        plan = recipe.load(path, [*place.overrides, *arguments.set, *_end(arguments, None)])
        decoder = _decoder(arguments, plan.model)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    if not arguments.data.is_file():
        parser.error(f"got --data {arguments.data}, expected a file of chat rows")
    try:
        _build_cache_if_needed(arguments, path, variants, place)
        budget = None
        if arguments.token_rows is not None:
            budget = row_budget(arguments.token_rows, plan, place.out, place.cache)
    except ValueError as error:
        parser.error(str(error))

    common = [*place.overrides, *study.shared, *arguments.set, *_end(arguments, budget)]
    rows: list[dict[str, Any]] = []
    for label, overrides in variants.items():
        folder = _folder(place, label)
        print(f"{label}: {folder}", file=sys.stderr, flush=True)
        row: dict[str, Any] = {"variant": label, "overrides": list(overrides)}
        try:
            drafter = trained(path, [*common, *overrides], folder, place.cache)
            row |= measured(drafter, None if budget is None else budget.rows_per_step)
            if decoder is not None:
                row["decoding"] = decoder.figures(drafter)
        except Exception as error:
            traceback.print_exc()
            row["error"] = f"{type(error).__name__}: {error}"
        rows.append(row)
        if arguments.json:
            write_json(arguments, path, budget, decoder, rows)
    print(table(rows))
    return 1 if any("error" in row for row in rows) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("--data", type=Path, required=True, help="chat rows, as JSONL")
    parser.add_argument("--cache", type=Path, required=True, help="the feature cache")
    parser.add_argument("--out", type=Path, required=True, help="one run a variant goes here")
    budget = parser.add_mutually_exclusive_group(required=True)
    budget.add_argument("--steps", type=int, help="optimiser steps a variant")
    budget.add_argument(
        "--token-rows", type=row_count, help="answer tokens that a variant learns from"
    )
    budget.add_argument("--minutes-each", type=float, help="at most; the recipe's steps end it too")
    parser.add_argument("--set", action="append", default=[], help="overrides for all variants")
    parser.add_argument("--variant", action="append", default=[], metavar="'LABEL: KEY=VALUE,…'")
    parser.add_argument("--only", nargs="+", metavar="LABEL", help="these variants alone")
    parser.add_argument("--recipe", type=Path, help="another recipe of the same drafter")
    parser.add_argument("--json", type=Path, help="write the results here too")
    decoding = parser.add_argument_group("decoding with each variant")
    decoding.add_argument("--prompts", type=Path, help="Spec-Bench's questions")
    decoding.add_argument("--bundles", type=Path, help="where bundles are built (--out/bundles)")
    decoding.add_argument("--per-category", type=int, default=10)
    decoding.add_argument("--max-new-tokens", type=int, default=128)
    decoding.add_argument("--nodes", type=int, nargs="+", default=(8, 16))
    decoding.add_argument("--precision", choices=PRECISIONS, default="fp32")
    return parser


def chosen(
    variants: Mapping[str, tuple[str, ...]], added: Sequence[str], only: Sequence[str] | None
) -> dict[str, tuple[str, ...]]:
    """Returns the study's variants and those added on the command line, or `only` some of them.

    Raises ValueError where `with_variants` does, and for a label in `only` that is not there.
    """
    every = with_variants(variants, added)
    unknown = [label for label in only or () if label not in every]
    if unknown:
        raise ValueError(f"got --only {unknown[0]!r}, expected some of {', '.join(every)}")
    return {label: every[label] for label in only or every}


def _end(arguments: argparse.Namespace, budget: RowBudget | None) -> list[str]:
    """Returns the overrides that end a run; None where token rows are not counted in steps yet."""
    if budget is not None:
        return [f"train.max_steps={budget.steps}"]
    if arguments.steps is not None:
        return [f"train.max_steps={arguments.steps}"]
    if arguments.minutes_each is not None:
        return [f"train.max_minutes={arguments.minutes_each}"]
    return []


def _decoder(arguments: argparse.Namespace, model: str | None) -> Decoder | None:
    if arguments.prompts is None:
        return None
    prompts = read_prompts(arguments.prompts, per_category=arguments.per_category)
    folder = arguments.bundles or arguments.out / "bundles"
    bundles = VariantBundles(folder, model, arguments.precision)
    return Decoder(bundles, Task(prompts, arguments.max_new_tokens, {}), arguments.nodes)


def _build_cache_if_needed(
    arguments: argparse.Namespace,
    path: Path,
    variants: Mapping[str, tuple[str, ...]],
    place: Place,
) -> None:
    """Builds the cache by the variant with most taps, unless the first run builds it as well or
    every variant has finished."""
    taps = {how: taps_of(path, [*arguments.set, *how]) for how in variants.values()}
    finished = [(_folder(place, label) / "drafter").exists() for label in variants]
    counts_rows = arguments.token_rows is not None and not (place.out / BUDGET).is_file()
    if counts_rows or (len(set(taps.values())) > 1 and not all(finished)):
        most = max(taps, key=lambda how: len(taps[how]))
        build_cache(path, [*arguments.set, *most], place)


def _folder(place: Place, label: str) -> Path:
    return place.out / re.sub(r"\W+", "-", label)


def table(rows: list[dict[str, Any]]) -> str:
    """Returns a Markdown table; guesses are numbered from 1, the token behind the root."""
    num_guesses = max((len(row.get("top1_K", ())) for row in rows), default=0)
    nodes = VALIDATION_BUDGET.max_nodes
    sizes = list(dict.fromkeys(size for row in rows for size in row.get("decoding", ())))
    top1 = [f"top-1, guess {k}" if k == 1 else str(k) for k in range(1, num_guesses + 1)]
    head = ["variant", *top1, f"accepted length, {nodes} nodes"]
    head += [f"decoding, {size}" for size in sizes] + ["parameters", "steps"]
    lines = [head, ["---", *["---:"] * (len(head) - 1)]]
    for row in rows:
        if "error" in row:
            lines.append([row["variant"], "failed", *[""] * (len(head) - 2)])
            continue
        accuracy = [f"{a:.3f}" for a in row["top1_K"]]
        lines.append(
            [
                row["variant"],
                *accuracy,
                *["-"] * (num_guesses - len(accuracy)),
                f"{row['accepted_length']:.3f}",
                *(f"{row['decoding'][size]['accepted_length']:.3f}" for size in sizes),
                f"{row['parameters'] / 1e6:.2f} M",
                str(row["steps"]),
            ]
        )
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def write_json(
    arguments: argparse.Namespace,
    path: Path,
    budget: RowBudget | None,
    decoder: Decoder | None,
    rows: list[dict[str, Any]],
) -> None:
    result = checkpoint.collect_provenance(
        study=arguments.study,
        recipe=path.name,
        shared=[*STUDIES[arguments.study].shared, *arguments.set],
        steps=arguments.steps if budget is None else budget.steps,
        minutes_each=arguments.minutes_each,
        token_rows=None if budget is None else asdict(budget),
        nodes=VALIDATION_BUDGET.max_nodes,
        max_new_tokens=None if decoder is None else decoder.task.max_new_tokens,
        variants=rows,
        provenance=provenance.collect(
            packages=("torch", "transformers"),
            prompts_file=arguments.prompts,
            prompts=None if decoder is None else decoder.task.prompts,
        ),
    )
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(arguments.json, json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
