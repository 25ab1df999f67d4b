"""Makes the smallest training runs, and what interrupts them."""

import csv
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
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


FORKED = """
import json, os, pathlib, socket, sys
from spec_export.cli import main
from spec_export.training import joint, run
for num_processes, environment, log, words in json.loads(sys.argv[1]):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}"}
    environment["ACCELERATE_USE_CPU"] = "true"
    children = []
    for rank in range(num_processes):
        if not (child := os.fork()):
            os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
            of_rank = {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": f"{num_processes}"}
            os.environ |= environment | of_rank
            sys.argv[1:] = words
            main()
        children.append(child)
    if any([os.waitpid(child, 0)[1] for child in children]):
        sys.exit(pathlib.Path(log).read_text()[-3000:])
"""


def train_in_processes(runs: Sequence[tuple[int, dict[str, str], str, list[str]]]) -> None:
    """Trains each of some runs in as many processes as it asks for, with what `accelerate launch`
    would tell them. They are forks, which need not import PyTorch again.

    runs: of each its number of processes, more of their environment, the file of what they say on
    stderr, and the words of `spec-export`.
    """
    command = [sys.executable, "-c", FORKED, json.dumps(runs)]
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
