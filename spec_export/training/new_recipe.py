"""Writes a complete recipe for a model, made of shipped ones: the demo's form of the drafter, and
where GPUs train it the rates of its authors.

Reads the model's config and tokenizer, and the data where there are some; never the weights.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from spec_export.model import files, target
from spec_export.model.config import DecoderConfig, read_config
from spec_export.training import data, disk, estimates, inputs, recipe
from spec_export.training.inputs import DEMO
from spec_runtime.files.writing import write_atomically

DEMO_LAYERS = 30
TOKENS = (5_000_000, 140_000_000)  # where no data tell: of the demo, and of the papers for GPUs
VOCABULARIES = (8192, 16384, 32768)
COVERED = 0.97  # of held-out answers' tokens, by the draft vocabulary that is chosen
MOST_EPOCHS, FEWEST_STEPS = 12, 1000
MICRO_BATCHES = [2**power for power in range(15, 10, -1)]  # tokens; the largest that fits
FREE = 0.9  # of a GPU's memory, which a run may take


class Rows(NamedTuple):
    """The tokens of the data, those of its answers, and the share of held-out answers' tokens that
    each size of the draft vocabulary covers, which nobody knows of data still to come."""

    tokens: int
    answers: int
    coverage: Mapping[int, float]


def write(
    out: Path,
    drafter: str,
    model: str | None,
    base: str | None = None,
    paths: Sequence[Path] = (),
    gpus: int = 0,
    tokens: int | None = None,
) -> tuple[recipe.Recipe, list[str], list[tuple[str, str, str]]]:
    """Writes a recipe to `out`; returns it, lines of what was chosen, and the estimates for it.

    model and base: the target, as `target.resolve` takes it. paths: files of rows; without any,
    `tokens` says how many there will be, by default as many as the demo or the papers had.
    Raises UserError as `inputs.require_new` and reading the model's config and the data do.
    """
    inputs.require_new(drafter, out, paths)
    source = target.without_weights(target.resolve(model, base=base))
    raw = target.read_config(source, has_weights=False)
    form, chosen = recipe.load(f"{DEMO}/{drafter}"), _rates(drafter, gpus)
    rates = recipe.load(chosen)
    shape = read_config(raw, (), min(rates.data.max_length, raw.max_position_embeddings))
    tokens = tokens or TOKENS[gpus > 0]
    rows = _rows(paths, target.load_tokenizer(source), shape) or Rows(tokens, tokens, {})
    folder = out.parent
    found = tuple(recipe.from_working_folder(str(path), folder) for path in paths)
    plan = recipe.Recipe(
        recipe.TargetSection(_place(model, folder), _place(base, folder)),
        fitted(form.drafter, shape.num_layers),
        recipe.DataSection(found or "answers.jsonl", shape.max_length),
        rates.train,
        recipe.ExportSection(
            draft_vocab=vocabulary(shape.vocab_size, rows.coverage), draft_vocab_prompts=1.0
        ),
        recipe.ValidateSection(),
        folder=folder,
    )
    sizes, machine = estimates.sizes(plan, raw, shape), estimates.machine(gpus)
    if gpus:
        is_stored = sizes.memory(MICRO_BATCHES[-1], holds_target=True) > FREE * machine.memory
    else:
        is_stored = sizes.width * rows.tokens < disk.free_bytes(folder.absolute())
    train = _train(rates.train, rows.tokens, sizes, machine, is_stored)
    plan = replace(plan, data=replace(plan.data, store_features=is_stored), train=train)
    notes = [
        f"[drafter] is that of {DEMO}/{drafter}, taps and layers at the same depths",
        f"[train] is that of {chosen}: lr = {train.lr:g}",
    ]
    if rows.coverage:
        covered = ", ".join(f"{size:,} {share:.1%}" for size, share in rows.coverage.items())
        notes.append(f"tokens of held-out answers that a draft vocabulary covers: {covered}")
    write_atomically(out, _text(plan, f"{drafter} for {source.name}", notes))
    return plan, notes, estimates.of_run(plan, sizes, machine, rows.tokens, rows.answers)


def _rates(drafter: str, gpus: int) -> str:
    """Returns the shipped recipe whose [train] is taken: on GPUs the one of the drafter's authors,
    if there is one. It trains for days, at lower rates, what the demo's trains in an hour."""
    ends = (f"/{drafter}", f"/{drafter}_medusa")
    found = [name for name in recipe.shipped() if name.endswith(ends) and DEMO not in name]
    return found[0] if found and gpus else f"{DEMO}/{drafter}"


def _rows(paths: Sequence[Path], tokenizer: Any, shape: DecoderConfig) -> Rows | None:
    """Reads the data as training does; None without any."""
    if not paths:
        return None
    examples = data.read(paths, tokenizer, shape.max_length)
    data.require_vocabulary(examples, shape.vocab_size)
    training, held_out = data.split(examples, recipe.DataSection.validation_fraction)
    counts_V = data.count_tokens(training, shape.vocab_size, prompt_weight=1.0)
    held_V, coverage = data.count_tokens(held_out, shape.vocab_size), {}
    for size in [size for size in VOCABULARIES if size < shape.vocab_size]:
        ids = data.most_frequent_tokens(counts_V, size, tokenizer.all_special_ids)
        coverage[size] = float(held_V[ids].sum() / held_V.sum())
    answers = sum(int(example.loss_T.sum()) for example in examples)
    return Rows(sum(len(example.token_T) for example in examples), answers, coverage)


def vocabulary(vocab_size: int, coverage: Mapping[int, float]) -> int | None:
    """Returns the size of the draft vocabulary, None for the target's whole one: the smallest that
    covers enough; a quarter of the target's, up to the largest, where no data tell."""
    enough = [size for size, share in coverage.items() if share >= COVERED]
    unknown = [size for size in VOCABULARIES if 4 * size >= vocab_size]
    size = min(enough if coverage else unknown, default=VOCABULARIES[-1])
    return size if size < vocab_size else None


def _place(model: str | None, folder: Path) -> str | None:
    """Returns a model as a recipe in this folder names it; a hub id stays as it is."""
    path = None if model is None else files.path_of(model)
    return model if path is None else str(recipe.from_working_folder(str(path), folder))


def fitted(section: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    """Returns the demo's [drafter] for a target of so many layers.

    Taps keep their share of the depth, and near an end their distance, as EAGLE-3's do: 2, 15 and
    27 of the demo's 30 layers are 2, 16 and 29 of 32, and 2, 40 and 77 of 80.
    """

    def there(layer: int) -> int:
        from_end = DEMO_LAYERS - layer
        near = layer if layer <= 3 else num_layers - from_end if from_end <= 3 else None
        found = round(layer * num_layers / DEMO_LAYERS) if near is None else near
        return min(max(found, 0), num_layers)

    fields = dict(section)
    if "taps" in fields:
        fields["taps"] = sorted(set(map(there, fields["taps"])))
    if fields["name"] == "skip_layer":
        fields["layers"] = max(1, there(fields["layers"]))
    return fields


def _train(
    rates: recipe.TrainSection,
    tokens: int,
    sizes: estimates.Sizes,
    machine: estimates.Machine,
    is_stored: bool,
) -> recipe.TrainSection:
    """Returns [train] for these data and this machine: a processor takes as many steps as the data
    are worth, and GPUs their authors' batch, in parts that fit, or less of few data."""
    batch = rates.batch_tokens * rates.grad_accumulation
    epochs = rates.epochs or MOST_EPOCHS
    if machine.gpus:
        batch = min(batch, int(epochs * tokens / FEWEST_STEPS))
        fitting = [
            size
            for size in MICRO_BATCHES
            if size * machine.gpus <= batch
            and sizes.memory(size, not is_stored) <= FREE * machine.memory
        ]
        size = max(fitting, default=MICRO_BATCHES[-1])
        parts = max(1, round(batch / (size * machine.gpus)))
        steps = math.ceil(epochs * tokens / (size * parts * machine.gpus))
        train = replace(
            rates, batch_tokens=size, grad_accumulation=parts, epochs=float(epochs), max_steps=None
        )
    else:
        steps = min(rates.max_steps or 10**9, math.ceil(MOST_EPOCHS * tokens / batch))
        train = replace(rates, max_steps=steps, epochs=None)
    warmup = min(rates.warmup, steps // 10) if isinstance(rates.warmup, int) else rates.warmup
    every = max(10, steps // 20)
    return replace(
        train, warmup=warmup, validate_every=every, checkpoint_every=every, precision="auto"
    )


def _text(plan: recipe.Recipe, what: str, notes: Sequence[str]) -> str:
    """Returns the recipe as TOML, headed by what it is and what was chosen."""
    lines = [f"# Trains {what}; written by spec-export recipe.", "#", *(f"# {x}" for x in notes)]
    for name, section in plan.as_dict().items():
        # Values are strings, numbers, truth values and lists of them, which JSON writes as TOML.
        lines += ["", f"[{name}]", *(f"{key} = {json.dumps(x)}" for key, x in section.items())]
    return "\n".join(lines) + "\n"
