"""Makes the smallest training runs, and what interrupts them."""

from __future__ import annotations

import csv
import json
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tiny_target import save_llama

from spec_export.training import folders

NUM_ROWS = 14
RECIPE = """
[target]
model = "./llama"

[drafter]
name = "parallelspec"
num_masks = 2
taps = [1]
top_k = 5
soft_weight = 0.5
anchor_fraction = 0.5

[data]
path = "data.jsonl"
max_length = 96
validation_fraction = 0.2

[train]
batch_tokens = 250
grad_accumulation = 2
lr = 3e-3
max_steps = 7
precision = "fp32"
log_every = 4
validate_every = 3
checkpoint_every = 2

[export]
draft_vocab = 60
"""


def write_recipe(folder: Path) -> Path:
    """Writes a recipe beside its target and data, whose answers have many lengths."""
    save_llama(folder / "llama")
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"say {i}"},
                {"role": "assistant", "content": "ab, cd. " * (1 + i % 5) + str(i)},
            ]
        }
        for i in range(NUM_ROWS)
    ]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "recipe.toml").write_text(RECIPE)
    return folder / "recipe.toml"


def curve(out: Path) -> list[dict[str, str]]:
    with (out / "curves.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def stored(out: Path, step: int, file: str) -> dict[str, torch.Tensor]:
    """Returns the tensors of one file of a step's checkpoint."""
    folder = out / "checkpoints" / folders.folder_name(step)
    return load_file(folder / f"{file}.safetensors")


def stop_in(owner: Any, name: str, call: int, error: BaseException) -> Callable[..., Any]:
    """Returns a method or function of `owner` that raises `error` when it is called that often."""
    method, calls = getattr(owner, name), []

    def stopping(of: object, *arguments: Any, **more: Any) -> Any:
        calls.append(1)
        if len(calls) == call:
            raise error
        return method(of, *arguments, **more)

    return stopping


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """Lets no file grow beyond this size, as a full disk would."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
