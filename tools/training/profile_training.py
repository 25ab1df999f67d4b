#!/usr/bin/env python3
"""Says where the seconds of a training step go.

    python -m tools.training.profile_training recipes/smollm2-135m/parallelspec.toml \
        --cache runs/parallelspec/features [--threads 1] [--steps 3] [--json OUT]
        [--variant "in float32: train.precision=fp32"]

The features are those of an earlier run (`--cache`), and no drafter is written. Steps run once for
the tokens per second and once more under the profiler for the parts: the loader, the head (soft
labels apart), attention, the layers' and inputs' other work, and the optimiser, each with its
gradient. The draft vocabulary is as large as the recipe's, and not made of the same tokens.
Each --variant measures another form of the recipe beside it, before it, in the same run.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from spec_export import drafters, target
from spec_export.decoder import Backbone
from spec_export.drafters.layers import Batch
from spec_export.training import batches, features, recipe
from spec_export.training.allocator import keep_big_blocks
from spec_runtime.cli.options import write_figures
from spec_runtime.files.writing import require_writable
from spec_runtime.measure import provenance
from tools.training.training_runs import with_variants

BACKWARD = "autograd::engine::evaluate_function"
RECIPE = "the recipe"  # the label of the recipe as it is
PARTS = ("loader", "head", "soft labels", "attention", "layer", "optimiser")


@dataclass(frozen=True)
class Cost:
    """What steps took: answer tokens learnt from, wall seconds, CPU seconds of this process, and
    the profiler's seconds of each part."""

    tokens: int
    wall_seconds: float
    cpu_seconds: float
    part_seconds: dict[str, float]

    def lines(self) -> list[str]:
        """Returns the report, a line a part."""
        total = sum(self.part_seconds.values())
        lines = [
            f"{part:12} {seconds:8.2f} s {seconds / total:6.1%}"
            for part, seconds in self.part_seconds.items()
        ]
        rate, cpu = self.tokens / self.wall_seconds, 1000 * self.cpu_seconds / self.tokens
        return [*lines, f"{rate:.0f} answer tokens/s, {cpu:.2f} CPU seconds per 1,000"]


class Steps:
    """Runs optimiser steps as training does, on the batches that `load` returns by number."""

    def __init__(self, drafter: Any, load: Callable[[int], Batch], is_bf16: bool) -> None:
        self.drafter, self.load, self.is_bf16 = drafter, load, is_bf16
        self.optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-5, fused=True)

    def run(self, number: int) -> int:
        """Runs one step and returns its answer tokens."""
        with torch.profiler.record_function("loader"):
            batch = self.load(number)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.is_bf16):
            loss, _ = self.drafter(batch, torch.Generator().manual_seed(number))
        loss.backward()
        with torch.profiler.record_function("optimiser"):
            torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        return int(batch.loss_BT.sum())

    def cost(self, count: int) -> Cost:
        """Returns what `count` steps cost, after one that does not count."""
        self.run(0)
        wall, cpu = time.perf_counter(), time.process_time()
        tokens = sum(self.run(number) for number in range(count))
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        cpu_alone = [ProfilerActivity.CPU]
        with profile(activities=cpu_alone) as profiler, torch.profiler.record_function("steps"):
            for number in range(count):
                self.run(number)
        return Cost(tokens, wall, cpu, part_seconds(profiler.events() or []))


def part_seconds(events: Sequence[Any]) -> dict[str, float]:
    """Returns the seconds of each of PARTS from a profile's events.

    "layer" is what the others leave of the range "steps". A backward operator belongs to the part
    whose forward operator has its sequence number.
    """

    def seconds(*names: str) -> float:
        return sum(e.cpu_time_total for e in events if e.name in names) / 1e6

    numbers: set[int] = set()
    waiting = [e for e in events if e.name == "attention"]
    while waiting:
        event = waiting.pop()
        numbers.add(event.sequence_nr)
        waiting += event.cpu_children
    gradients = [
        e.cpu_time_total
        for e in events
        if e.name.startswith(BACKWARD) and e.sequence_nr in numbers - {-1}
    ]
    found = {part: seconds(part) for part in PARTS}
    found["attention"] += sum(gradients) / 1e6
    found["head"] = seconds("_HeadLosses", f"{BACKWARD}: _HeadLossesBackward")
    found["head"] -= found["soft labels"]
    found["layer"] = seconds("steps") - sum(s for part, s in found.items() if part != "layer")
    return found


def cost_of(plan: recipe.Recipe, path: Path, model: Any, cache: Path, count: int) -> Cost:
    """Returns what `count` steps of the recipe `plan`, read from `path`, cost.

    `model` is the target as transformers has it, `cache` the folder with its features.
    """
    module = drafters.load(plan.drafter_name)
    config = recipe.build_config(module.Config, plan.drafter_fields, str(path))
    taps = tuple(config.taps)
    ends = target.ends(Backbone.from_transformers(model, taps))
    torch.manual_seed(plan.train.seed)
    num_tokens = plan.export.draft_vocab or len(ends.head_VD)
    drafter = module.Drafter(config, ends, torch.arange(num_tokens))
    drafter.shortlist_size = plan.train.shortlist
    store = features.FeatureCache(cache, taps)
    order = batches.epoch_batches(store.length_N, plan.train.batch_tokens, plan.train.seed, 0)

    def load(number: int) -> Batch:
        return batches.padded(store, order[number % len(order)], torch.device("cpu"))

    return Steps(drafter, load, plan.train.precision == "bf16").cost(count)


def main(words: list[str] | None = None) -> None:
    """Measures the recipe and its variants, prints a report of each, and writes --json."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--cache", type=Path, required=True, help="a run's folder of features")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--threads", type=int, help="of torch; all by default")
    parser.add_argument("--set", action="append", default=[], help="section.key=value, as in train")
    parser.add_argument("--variant", action="append", default=[], metavar="'LABEL: KEY=VALUE,…'")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(words)
    if arguments.json:
        require_writable(arguments.json)
    try:
        variants = with_variants({RECIPE: ()}, arguments.variant)
    except ValueError as error:
        parser.error(str(error))
    keep_big_blocks()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    model, _ = target.load(target.resolve(recipe.load(arguments.recipe, arguments.set).model))
    variants[RECIPE] = variants.pop(RECIPE)  # last
    rows = []
    for label, overrides in variants.items():
        plan = recipe.load(arguments.recipe, [*arguments.set, *overrides])
        cost = cost_of(plan, arguments.recipe, model, arguments.cache, arguments.steps)
        print("\n".join([f"{label}:", *cost.lines()]), flush=True)
        rows.append({"variant": label, "overrides": list(overrides), **asdict(cost)})
    if arguments.json:
        about = provenance.collect(
            threads=torch.get_num_threads(),
            packages=("torch",),
            note="nothing is decoded; not recorded: prompts",
        )
        write_figures(arguments.json, {"provenance": about, "rows": rows})


if __name__ == "__main__":
    main()
