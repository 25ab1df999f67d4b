"""Trains several drafters on one feature cache, one after the other, on a CPU or a GPU.

    python -m tools.training.train_drafters --data answers.jsonl --out runs/all --token-rows 3e6 \\
        recipes/smollm2-135m/*.toml

--data replaces each recipe's data. With --token-rows every drafter learns from this many answer
tokens, and the same command goes on where it was stopped. With --minutes the time that is left when
the features are there is shared equally. A drafter that fails is reported and skipped, and the exit
code is 1. Every recipe's run is under --out, and `results.json` there has each one's validation or
error.
"""

from __future__ import annotations

import json
import time
import traceback
from pathlib import Path

from spec_export.training import recipe
from tools.figures import command_line, run, write
from tools.training.training_runs import (
    Place,
    build_cache,
    measured,
    row_budget,
    row_count,
    taps_of,
    trained,
)


def main(words: list[str] | None = None) -> int:
    """Trains as the command line says; returns 1 if a drafter failed."""
    parser = command_line(__doc__)
    parser.add_argument("recipes", nargs="+", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cache", type=Path, help="the feature cache (--out/features)")
    budget = parser.add_mutually_exclusive_group(required=True)
    budget.add_argument("--minutes", type=float, help="for all drafters together")
    budget.add_argument("--token-rows", type=row_count, help="answer tokens a drafter learns from")
    parser.add_argument(
        "--loading", type=float, default=0.3, help="minutes a drafter's start takes"
    )
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    arguments = parser.parse_args(words)
    place = Place(arguments.data, arguments.cache or arguments.out / "features", arguments.out)
    place.require_data()
    # The recipe with the most taps comes first: its feature cache serves the others.
    recipes = sorted(arguments.recipes, key=lambda path: len(taps_of(path)), reverse=True)
    deadline = time.monotonic() + 60 * (arguments.minutes or 0)
    build_cache(recipes[0], arguments.overrides, place)
    results: dict[str, object] = {}
    failed = False
    for i, path in enumerate(recipes):
        begin, folder = time.monotonic(), place.out / path.stem
        common = [*place.overrides, *arguments.overrides]
        try:
            rows_per_step = None
            if arguments.token_rows is not None:
                plan = recipe.load(path, common)
                rows = row_budget(arguments.token_rows, plan, folder, place.cache)
                rows_per_step = rows.rows_per_step
                limit = f"train.max_steps={rows.steps}"
            else:
                minutes = (deadline - begin) / 60 / (len(recipes) - i) - arguments.loading
                limit = f"train.max_minutes={max(0.1, minutes):.2f}"
            drafter = trained(path, [*common, limit], folder, place.cache)
            about = json.loads((drafter / "config.json").read_text())["provenance"]
            validation = about["validation"]
            results[path.stem] = validation and {**validation, **measured(drafter, rows_per_step)}
        except Exception:
            traceback.print_exc()
            failed = True
            results[path.stem] = traceback.format_exc(limit=0).splitlines()[-1]
        print(f"{path.stem}: {(time.monotonic() - begin) / 60:.1f} minutes", flush=True)
        write(arguments.out / "results.json", results, packages=("torch", "transformers"))
    print(json.dumps(results, indent=1))
    return int(failed)


if __name__ == "__main__":
    run(main)
