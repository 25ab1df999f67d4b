"""Trains several drafters on one feature cache, one after the other, on a CPU or a GPU.

    python tools/train_drafters.py --data answers.jsonl --out runs/all recipes/smollm2-135m/*.toml

--data replaces each recipe's data. The minutes of --minutes that are left when the features are
there are shared equally. A drafter that fails is reported and skipped. Every recipe's run is under
--out, and `results.json` there has each one's validation or error. --shards DIR copies the finished
drafters to DIR in files of at most 15 MiB (join them with cat), for machines that return no larger
files.
"""

from __future__ import annotations

import argparse
import json
import time
import traceback
from pathlib import Path

from spec_export.training import recipe
from spec_export.training import run as train
from spec_runtime.files import write_atomically
from spec_runtime.measure import provenance

SHARD_BYTES = 15 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipes", nargs="+", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, required=True, help="for all drafters together")
    parser.add_argument(
        "--loading", type=float, default=0.3, help="minutes a drafter's start takes"
    )
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    parser.add_argument("--shards", type=Path)
    arguments = parser.parse_args()
    # the recipe with the most taps comes first: its feature cache serves the others
    recipes = sorted(arguments.recipes, key=num_taps, reverse=True)
    overrides = [f"data.path={json.dumps(str(arguments.data.resolve()))}", *arguments.overrides]
    deadline = time.monotonic() + 60 * arguments.minutes
    cache = arguments.out / "features"
    # two steps of the first recipe build the cache, so that it takes no drafter's time
    train.run(
        recipes[0], [*overrides, "train.max_steps=2"], arguments.out / "first-steps", cache=cache
    )
    about = provenance.collect(packages=("torch", "transformers"))
    results: dict[str, object] = {"provenance": about}
    for i, path in enumerate(recipes):
        begin = time.monotonic()
        minutes = max(0.1, (deadline - begin) / 60 / (len(recipes) - i) - arguments.loading)
        limit = f"train.max_minutes={minutes:.2f}"
        try:
            folder = train.run(path, [*overrides, limit], arguments.out / path.stem, cache=cache)
            config = json.loads((folder / "config.json").read_text())
            results[path.stem] = config["provenance"]["validation"]
            if arguments.shards:
                shard(folder, arguments.shards, path.stem)
        except Exception:
            traceback.print_exc()
            results[path.stem] = traceback.format_exc(limit=0).splitlines()[-1]
        print(f"{path.stem}: {(time.monotonic() - begin) / 60:.1f} minutes", flush=True)
        write_atomically(arguments.out / "results.json", json.dumps(results, indent=1))
    print(json.dumps(results, indent=1))


def num_taps(path: Path) -> int:
    """Returns how many target layers the recipe's drafter reads beside the final feature."""
    return len(recipe.load(path).drafter_fields.get("taps", ()))


def shard(drafter: Path, folder: Path, name: str) -> None:
    """Copies a drafter's files to `folder` in parts of at most `SHARD_BYTES`."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in sorted(drafter.iterdir()):
        content = file.read_bytes()
        for part, begin in enumerate(range(0, len(content), SHARD_BYTES)):
            target = folder / f"{name}.{file.name}.{part}"
            target.write_bytes(content[begin : begin + SHARD_BYTES])


if __name__ == "__main__":
    main()
