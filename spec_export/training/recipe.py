"""Reads training recipes: TOML files with overrides, whose unknown or wrong keys are refused.

A recipe has the sections that every drafter shares, and [drafter], which stays a mapping until the
drafter's own Config class is built from it by `build_config`.
"""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from annotated_types import Ge, Gt, Le, Lt

from spec_runtime.errors import UserError
from spec_runtime.files.mapping import (
    Must,
    added_later,
    from_mapping,
    parse_toml,
    require_keys,
    to_json,
)

T = TypeVar("T")

SHIPPED = Path(__file__).parents[1] / "assets" / "recipes"
MAX_SEED = 2**32 - 1
MAX_EPOCHS = 1e6


# The numbers that recipes and drafters' configs are made of.
Count = Annotated[int, Ge(1)]
AtLeastZero = Annotated[float, Ge(0)]
AboveZero = Annotated[float, Gt(0)]
Share = Annotated[float, Ge(0), Lt(1)]


@dataclass(frozen=True)
class TargetSection:
    """[target]: the model to draft for.

    `model` is a folder, a hub id, a GGUF file or a LoRA adapter's folder; absent means the built-in
    demo. `base` is the adapter's base model if not the one that it names. As all paths of a
    recipe, both start from the recipe's folder; what is not there is a hub id.
    """

    model: str | None = None
    base: str | None = None


def _are_named(paths: str | tuple[str, ...]) -> bool:
    return bool(paths) and all(paths)


@dataclass(frozen=True)
class DataSection:
    """[data]: the rows to train on.

    `path` stays as written in the recipe, so that provenance names no machine; `Recipe.data_paths`
    resolves it. `max_length` cuts sequences, in tokens. `sources` keeps only rows whose "source" is
    listed; "" stands for rows that have none. `allow_other_target` takes answers although another
    model than the target wrote them. Without `store_features` the target computes its features in
    each step; with "auto" it does so on a GPU.
    """

    path: Annotated[str | tuple[str, ...], Must(_are_named, "one file or a list of files")]
    max_length: Annotated[int, Ge(2)] = 1024
    validation_fraction: Share = 0.02
    sources: tuple[str, ...] | None = None
    allow_other_target: bool = added_later(False)
    store_features: bool | Literal["auto"] = added_later("auto")


@dataclass(frozen=True)
class TrainSection:
    """[train]: optimiser, schedule and how long to train.

    Training ends at `epochs`, `max_steps` or `max_minutes`, whichever comes first; the learning
    rate's schedule ends there too. `batch_tokens` counts the tokens of one micro-batch; an
    optimiser step takes `grad_accumulation` micro-batches. `warmup` is a number of optimiser steps
    (an integer) or a share of all of them (a fraction below 1). `ema` is the decay per optimiser
    step of an exponential moving average of the weights, which is then validated and exported in
    their place; 0 means none. See average.py. With a `shortlist` a step's losses through the frozen
    LM head read that many tokens of the draft vocabulary, drawn anew each step, in place of all
    them; 0 means all. See losses.py. `precision` is that of the steps and of a frozen target: with
    "auto" bf16 where the machine is fast at it.
    """

    batch_tokens: Count = 8192
    grad_accumulation: Count = 1
    lr: AboveZero = 1e-3
    betas: tuple[Share, Share] = (0.9, 0.95)
    weight_decay: AtLeastZero = 0.0
    grad_clip: AboveZero = 1.0
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    warmup: Annotated[
        int | float,
        Ge(0),
        Must(lambda x: isinstance(x, int) or x < 1, "an integer (steps) or a fraction below 1"),
    ] = 0.03
    epochs: Annotated[float | None, Gt(0), Le(MAX_EPOCHS)] = None
    max_steps: Count | None = None
    max_minutes: AboveZero | None = None
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    seed: Annotated[int, Ge(0), Le(MAX_SEED)] = 0
    log_every: Count = 10
    validate_every: Count = 200
    checkpoint_every: Count = 200
    keep_checkpoints: Count = 2
    ema: Share = added_later(0.0)
    shortlist: Annotated[int, Ge(0)] = added_later(0)

    def __post_init__(self) -> None:
        if (self.epochs, self.max_steps, self.max_minutes) == (None, None, None):
            raise UserError(
                "got neither epochs nor max_steps nor max_minutes, expected one of them"
            )
        if self.ends_by_time_alone and not isinstance(self.warmup, int):
            raise UserError(
                f"got warmup {self.warmup} of an unknown number of steps, expected an integer "
                "where only max_minutes ends training"
            )

    @property
    def ends_by_time_alone(self) -> bool:
        """Returns whether nothing but `max_minutes` ends the training."""
        return self.epochs is None and self.max_steps is None

    def total_steps(self, steps_per_epoch: int) -> int:
        """Returns the optimiser steps of the whole run, at least 1."""
        if self.ends_by_time_alone:
            return 10**9  # more than any run makes
        by_epochs = math.inf if self.epochs is None else math.ceil(self.epochs * steps_per_epoch)
        by_steps = math.inf if self.max_steps is None else self.max_steps
        return max(1, int(min(by_epochs, by_steps)))

    def lr_factor(self, step: int, total_steps: int, time_share: float = 0.0) -> float:
        """Returns the multiplier of `lr` for optimiser step `step`, counted from 0.

        After a linear warm-up the schedule falls to 0 at the last step, or earlier if the time ends
        first: `time_share` is the share of `max_minutes` that is over. A linear schedule over 6
        steps with 2 of warm-up: 0.5, 1, 1, 0.75, 0.5, 0.25.
        """
        warmup = (
            self.warmup if isinstance(self.warmup, int) else math.ceil(self.warmup * total_steps)
        )
        if step < warmup:
            return (step + 1) / warmup
        if self.schedule == "constant":
            return 1.0
        left = 1 - min(1.0, max((step - warmup) / max(1, total_steps - warmup), time_share))
        return left if self.schedule == "linear" else 0.5 * (1 - math.cos(math.pi * left))


@dataclass(frozen=True)
class ExportSection:
    """[export]: the drafter's form in a bundle.

    `precision` is the exported drafter's. `draft_vocab` is the number of the most frequent answer
    tokens that its head can guess; it is trained and exported so. Absent means the whole
    vocabulary. A prompt's token counts `draft_vocab_prompts` times as much as an answer's: rows
    with broad prompts hold words that answers to others will need. `bigrams` gives a drafter that
    guesses in one pass a table of which tokens follow which in the
    answers, see bigrams.py.
    """

    precision: Literal["fp32", "int8", "int4", "fp16", "bf16"] = "fp32"
    draft_vocab: Count | None = None
    draft_vocab_prompts: AtLeastZero = 0.0
    bigrams: bool = added_later(True)


@dataclass(frozen=True)
class ValidateSection:
    """[validate]: with `engine` the accepted length of a validation is that of the runtime, which
    drafts on held-out prompts with a bundle that is built for it; else it is simulated."""

    engine: bool = added_later(False)


@dataclass(frozen=True)
class JointSection:
    """[joint]: trains the target too, through a LoRA adapter; see joint.py.

    Without this section the target is frozen. `backbone_lr` is the adapter's learning rate,
    `train.lr` the drafter's; warm-up and schedule scale both. `drafter_ramp = "sine"` raises the
    drafter's weight to `drafter_weight` over the whole run. `layer_dropout` is the probability with
    which a sequence skips the target's last layer.
    """

    lora_rank: Count = 32
    lora_alpha: Count = 16
    lora_dropout: Share = 0.05
    backbone_lr: AboveZero = 5e-4
    backbone_loss: Literal["ce", "distill"] = "ce"
    backbone_weight: AtLeastZero = 1.0
    drafter_weight: AboveZero = 0.2
    drafter_ramp: Literal["none", "sine"] = "none"
    layer_dropout: Share = 0.0


@dataclass(frozen=True)
class Recipe:
    """A whole recipe.

    `drafter` is that section as written: "name" and the fields of that drafter's Config. `folder`
    is the recipe file's, from which relative paths start.
    """

    target: TargetSection
    drafter: Mapping[str, Any]
    data: DataSection
    train: TrainSection
    export: ExportSection
    validate: ValidateSection
    joint: JointSection | None = None
    folder: Path = field(default=Path(), compare=False)

    def __post_init__(self) -> None:
        name = self.drafter.get("name")
        if not isinstance(name, str) or not name:
            raise UserError(f"[drafter].name: got {name!r:.80}, expected the name of a drafter")
        if self.validate.engine and self.joint:
            raise UserError("got validate.engine with [joint], expected a target that is frozen")

    @property
    def drafter_name(self) -> str:
        return str(self.drafter["name"])

    @property
    def drafter_fields(self) -> dict[str, Any]:
        """Returns [drafter] without its name: the fields of the drafter's Config."""
        return {key: value for key, value in self.drafter.items() if key != "name"}

    @property
    def data_paths(self) -> tuple[Path, ...]:
        """Returns the data files; relative paths start from the recipe's folder."""
        paths = (self.data.path,) if isinstance(self.data.path, str) else self.data.path
        return tuple(self.folder / path for path in paths)

    @property
    def model(self) -> str | None:
        """Returns the target as `spec_export.model.target.resolve` takes it."""
        return self._from_folder(self.target.model)

    @property
    def base(self) -> str | None:
        """Returns the base of a target that is an adapter, likewise."""
        return self._from_folder(self.target.base)

    def _from_folder(self, model: str | None) -> str | None:
        if model is None:
            return None
        path = str(self.folder / model)
        return path if model.startswith(("./", "../")) or os.path.exists(path) else model

    def as_dict(self) -> dict[str, Any]:
        """Returns plain JSON and TOML values by section.

        Keys that are not set are left out, and paths stay as written.
        """
        sections = {name: getattr(self, name) for name in SECTIONS if getattr(self, name)}
        return {
            name: _plain(value if name == "drafter" else to_json(value))
            for name, value in sections.items()
        }


SECTIONS: dict[str, type | None] = {
    "target": TargetSection,
    "drafter": None,
    "data": DataSection,
    "train": TrainSection,
    "export": ExportSection,
    "validate": ValidateSection,
    "joint": JointSection,
}
OPTIONAL = ("joint",)  # leaving the section out is not the same as taking its defaults


def shipped() -> dict[str, Path]:
    """Returns the files of the shipped recipes by their names, such as "vicuna-7b/eagle"."""
    files = sorted(SHIPPED.glob("*/*.toml"))
    return {file.relative_to(SHIPPED).with_suffix("").as_posix(): file for file in files}


def load(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Reads the recipe at `path`, or the shipped one of that name, and applies `overrides`, each
    "section.key=value". A shipped recipe's paths start from the working folder.

    Raises UserError, which names what is wrong.
    """
    path = Path(path)
    if not path.exists() and path.as_posix() in shipped():
        text = shipped()[path.as_posix()].read_text(encoding="utf-8")
        return parse(text, overrides, where=str(path))
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UserError(
            f"cannot read recipe {path}: {error}, expected a TOML file, or the name of a shipped "
            "recipe (spec-export recipe --list)"
        ) from error
    return parse(text, overrides, folder=path.parent, where=str(path))


def parse(
    text: str, overrides: Sequence[str] = (), folder: Path = Path(), where: str = "recipe"
) -> Recipe:
    """Does what `load` does, from TOML text.

    Relative data paths start from `folder`; `where` names the recipe in messages.
    """
    try:
        tables = parse_toml(text)
    except ValueError as error:
        raise UserError(f"{where} is not valid TOML: {error}") from error
    require_keys(tables, SECTIONS, (), where)
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise UserError(f"{where}: {name} is {table!r:.80}, expected a section [{name}]")
    for override in overrides:
        section, key, value = parse_override(override)
        if (section, key) == ("data", "path"):
            value = from_working_folder(value, folder)
        if section == "target" and os.path.exists(str(value)):
            value = from_working_folder(value, folder)
        tables.setdefault(section, {})[key] = value
    for name in ("drafter", "data", "train"):
        if name not in tables:
            known = ", ".join(SECTIONS)
            raise UserError(f"{where} has no section [{name}], expected {known}")
    built = {
        name: tables.get(name, {})
        if cls is None
        else build_config(cls, tables.get(name, {}), f"{where} [{name}]")
        for name, cls in SECTIONS.items()
        if name in tables or name not in OPTIONAL
    }
    return Recipe(**built, folder=folder)


def parse_override(text: str) -> tuple[str, str, Any]:
    """Returns section, key and value of an override: "train.lr=3e-4" gives ("train", "lr", 0.0003).

    The value is read as TOML; anything else is taken as a string, so that quotes may be left out.
    Raises UserError on another form, an unknown section, or a broken TOML string or list.
    """
    name, equals, value = text.partition("=")
    section, dot, key = name.strip().partition(".")
    if not (equals and dot and section and key):
        raise UserError(
            f"got override {text!r:.200}, expected section.key=value such as train.lr=3e-4"
        )
    if section not in SECTIONS:
        raise UserError(
            f"override {text!r:.200}: unknown section {section!r:.80}, expected "
            f"{', '.join(SECTIONS)}"
        )
    value = value.strip()
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"override {text!r:.200} is not UTF-8, expected a text") from error
    try:
        parsed = parse_toml(f"value = {value}")
        if parsed.keys() == {"value"}:
            return section, key, parsed["value"]
    except ValueError as error:
        # A bare word is meant as a string; an opening quote or bracket shows that TOML was meant.
        if value.startswith(('"', "'", "[", "{")):
            raise UserError(f"override {text!r:.80}: not a TOML value: {error}") from error
    return section, key, value


def build_config(cls: type[T], mapping: Mapping[str, Any], where: str) -> T:
    """Returns the frozen dataclass `cls` from the values of a TOML or JSON mapping.

    `where` names the mapping in messages, such as "recipe.toml [drafter]". Raises UserError for
    what does not fit, see `spec_runtime.files.mapping.from_mapping`.
    """
    return from_mapping(cls, mapping, where, none="absent")


def from_working_folder(value: Any, folder: Path) -> Any:
    """Restates a data path, or a list of them, from the working folder to the recipe's `folder`.

    A path typed on the command line starts from the working folder.
    """
    if isinstance(value, list):
        return [from_working_folder(item, folder) for item in value]
    if not isinstance(value, str) or not value or os.path.isabs(value):
        return value
    return Path(os.path.relpath(value, folder)).as_posix()


def _plain(value: Any) -> Any:
    """Returns mappings and sequences as dicts and lists, without the keys whose value is None."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items() if item is not None}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
