"""The part of tools/gpu/check.py that trains: a few steps of every drafter for a random target."""

from __future__ import annotations

import csv
import json
import os
import time
from pathlib import Path

import numpy as np

from tools.gpu import graphs
from tools.gpu.job import TINY, Check
from tools.gpu.report import Findings, TableRow
from tools.gpu.speed import require_export

STEPS = 4
NUM_ROWS = 24
# What a drafter of a target with two layers needs beside its defaults.
FIELDS = {
    "dflash": "taps = [1, 2]",
    "eagle3": "taps = [0, 1, 2]",
    "peagle": "taps = [0, 1, 2]",
    "skip_layer": "layers = 1",
}
RECIPE = """
[target]
model = "toy"
[drafter]
name = "{name}"
{fields}
[data]
path = "data.jsonl"
store_features = {stored}
validation_fraction = 0.2
[train]
batch_tokens = 256
max_steps = {steps}
log_every = 1
ema = 0.9
shortlist = 40
[export]
draft_vocab = 60
"""


def training(check: Check, found: Findings) -> None:
    """Trains every drafter that learns, its features stored for one and computed for the others."""
    require_export()
    from spec_export import drafters

    names = [name for name in drafters.trainable() if name != "pard"]  # begins as a whole model
    if check.device == "cpu":
        os.environ["ACCELERATE_USE_CPU"] = "true"
    graphs.random_target(check.work / "toy", TINY)
    rng = np.random.default_rng(0)
    rows = [
        {"tokens": rng.integers(2, 96, 60).tolist(), "loss_mask": [0] * 12 + [1] * 48}
        for _ in range(NUM_ROWS)
    ]
    (check.work / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for stored, name in enumerate(names):
        row = found.attempt(name, _train, check.work, name, not stored)
        if row is not None:
            found.add(row)
    rows = found.tables.get("measured", [])
    found.figure = f"{len(rows)} of {len(names)} drafters train"


def _train(folder: Path, name: str, stored: bool) -> TableRow:
    """Trains a drafter and returns its losses; raises UserError if one is not finite."""
    from spec_export.training import run

    recipe = folder / f"{name}.toml"
    fields = FIELDS.get(name, "")
    text = RECIPE.format(name=name, fields=fields, stored=str(stored).lower(), steps=STEPS)
    recipe.write_text(text)
    begin = time.monotonic()
    run.run(recipe, out=folder / f"{name}-run")
    with (folder / f"{name}-run" / "curves.csv").open(newline="") as file:
        losses = [float(row["loss"]) for row in csv.DictReader(file) if row["loss"]]
    row: TableRow = {"drafter": name, "features": "stored" if stored else "computed"}
    row |= {"first loss": losses[0], "last loss": losses[-1]}
    return row | {"seconds": time.monotonic() - begin}
