"""Training recipes: read a TOML file, apply overrides, refuse what is not known.

This file knows the sections every drafter shares. It does not know any drafter's fields:
`[drafter]` stays a mapping until the drafter's own Config class is built from it with
`build_config`. It reads no training data.
"""

import dataclasses
import json
import math
import os
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

T = TypeVar("T")


class RecipeError(ValueError):
    """A recipe, an override or a config mapping that cannot be used."""


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise RecipeError(message)


@dataclass(frozen=True)
class TargetSection:
    """`model`: folder, hub id or GGUF file; absent = the built-in demo. "./x" is relative to the
    recipe file."""

    model: str | None = None


@dataclass(frozen=True)
class DataSection:
    """Which rows to train on.

    `path` stays as written in the recipe (so that provenance names no machine); `Recipe.data_paths`
    resolves it. `sources` keeps only rows whose "source" is listed; "" stands for rows that have
    none.
    """

    path: str | tuple[str, ...]
    max_length: int = 1024
    validation_fraction: float = 0.02
    sources: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        _require(bool(self.path), "[data] path is empty, expected one file or a list of files")
        _require(
            self.max_length >= 2, f"[data] max_length is {self.max_length}, expected at least 2"
        )
        _require(
            0 <= self.validation_fraction < 1,
            f"[data] validation_fraction is {self.validation_fraction}, expected 0 <= x < 1",
        )


@dataclass(frozen=True)
class TrainSection:
    """How to train. Training ends at `epochs`, `max_steps` or `max_minutes`, whichever comes first;
    the learning rate's schedule ends there too.

    `batch_tokens` counts the tokens of one micro-batch; an optimiser step takes `grad_accumulation`
    of them. `warmup`: an integer counts optimiser steps, a fraction below 1 is a share of all of
    them.
    """

    batch_tokens: int = 8192
    grad_accumulation: int = 1
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    grad_clip: float = 1.0
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    warmup: int | float = 0.03
    epochs: float | None = None
    max_steps: int | None = None
    max_minutes: float | None = None
    precision: Literal["fp32", "bf16"] = "bf16"
    seed: int = 0
    log_every: int = 10
    validate_every: int = 200
    checkpoint_every: int = 200
    keep_checkpoints: int = 2

    def __post_init__(self) -> None:
        for name in ("batch_tokens", "grad_accumulation", "log_every", "validate_every"):
            _require(
                getattr(self, name) >= 1,
                f"[train] {name} is {getattr(self, name)}, expected at least 1",
            )
        for name in ("checkpoint_every", "keep_checkpoints"):
            _require(
                getattr(self, name) >= 1,
                f"[train] {name} is {getattr(self, name)}, expected at least 1",
            )
        _require(self.lr > 0, f"[train] lr is {self.lr}, expected more than 0")
        _require(self.grad_clip > 0, f"[train] grad_clip is {self.grad_clip}, expected more than 0")
        _require(
            self.weight_decay >= 0,
            f"[train] weight_decay is {self.weight_decay}, expected 0 or more",
        )
        _require(
            all(0 <= beta < 1 for beta in self.betas),
            f"[train] betas are {list(self.betas)}, expected two numbers 0 <= x < 1",
        )
        _require(
            self.warmup >= 0 and (isinstance(self.warmup, int) or self.warmup < 1),
            f"[train] warmup is {self.warmup}, expected an integer (steps) or a fraction below 1",
        )
        _require(
            (self.epochs, self.max_steps, self.max_minutes) != (None, None, None),
            "[train] has neither epochs nor max_steps nor max_minutes, expected one of them",
        )
        _require(
            self.epochs is None or self.epochs > 0, f"[train] epochs is {self.epochs}, expected > 0"
        )
        _require(
            self.max_steps is None or self.max_steps >= 1,
            f"[train] max_steps is {self.max_steps}, expected at least 1",
        )
        _require(
            self.max_minutes is None or self.max_minutes > 0,
            f"[train] max_minutes is {self.max_minutes}, expected > 0",
        )
        _require(
            self.epochs is not None or self.max_steps is not None or isinstance(self.warmup, int),
            f"[train] warmup is {self.warmup} of an unknown number of steps, expected an integer "
            "where only max_minutes ends training",
        )

    def total_steps(self, steps_per_epoch: int) -> int:
        """Optimiser steps of the whole run, at least 1."""
        if self.epochs is None and self.max_steps is None:
            return 10**9  # the time ends it
        by_epochs = math.inf if self.epochs is None else math.ceil(self.epochs * steps_per_epoch)
        by_steps = math.inf if self.max_steps is None else self.max_steps
        return max(1, int(min(by_epochs, by_steps)))

    def lr_factor(self, step: int, total_steps: int, time_share: float = 0.0) -> float:
        """Multiplier of `lr` for optimiser step `step` (from 0): linear warm-up, then the schedule
        down to 0 as steps end, or the time, of which `time_share` is over."""
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
    """`precision` of the exported drafter. `draft_vocab`: how many of the most frequent answer
    tokens its head can guess (trained and exported with it); absent = the whole vocabulary."""

    precision: Literal["fp32", "int8", "int4", "fp16", "bf16"] = "fp32"
    draft_vocab: int | None = None

    def __post_init__(self) -> None:
        _require(
            self.draft_vocab is None or self.draft_vocab >= 1,
            f"[export] draft_vocab is {self.draft_vocab}, expected at least 1",
        )


@dataclass(frozen=True)
class JointSection:
    """Train the target too, through a LoRA adapter; see joint.py. Absent = the target is frozen.

    `backbone_lr` is the adapter's, `train.lr` the drafter's. For the first `drafter_only_steps` the
    adapter rests; `drafter_ramp = "sine"` raises the drafter's weight to `drafter_weight` over the
    whole run. `layer_dropout`: how often a sequence skips the target's last layer.
    """

    lora_rank: int = 32
    lora_alpha: int = 16
    lora_dropout: float = 0.05
    backbone_lr: float = 5e-4
    backbone_loss: Literal["ce", "distill"] = "ce"
    backbone_weight: float = 1.0
    drafter_weight: float = 0.2
    drafter_ramp: Literal["none", "sine"] = "none"
    drafter_only_steps: int = 0
    layer_dropout: float = 0.0

    def __post_init__(self) -> None:
        _require(self.lora_rank >= 1, f"[joint] lora_rank is {self.lora_rank}, expected >= 1")
        for name in ("lora_dropout", "layer_dropout"):
            _require(
                0 <= getattr(self, name) < 1,
                f"[joint] {name} is {getattr(self, name)}, expected 0 <= x < 1",
            )
        for name in ("lora_alpha", "backbone_lr", "drafter_weight"):
            _require(
                getattr(self, name) > 0, f"[joint] {name} is {getattr(self, name)}, expected > 0"
            )
        for name in ("backbone_weight", "drafter_only_steps"):
            _require(
                getattr(self, name) >= 0, f"[joint] {name} is {getattr(self, name)}, expected >= 0"
            )


@dataclass(frozen=True)
class Recipe:
    """A whole recipe. `drafter` is the section as written: "name" and fields of that drafter's
    Config."""

    target: TargetSection
    drafter: Mapping[str, Any]
    data: DataSection
    train: TrainSection
    export: ExportSection
    joint: JointSection | None = None
    folder: Path = field(default=Path(), compare=False)

    def __post_init__(self) -> None:
        _require(
            isinstance(self.drafter.get("name"), str) and bool(self.drafter["name"]),
            f"[drafter] name is {self.drafter.get('name')!r}, expected the name of a drafter",
        )

    @property
    def drafter_name(self) -> str:
        return str(self.drafter["name"])

    @property
    def drafter_fields(self) -> dict[str, Any]:
        """`[drafter]` without its name: what `build_config(Config, …, "[drafter]")` takes."""
        return {key: value for key, value in self.drafter.items() if key != "name"}

    @property
    def data_paths(self) -> tuple[Path, ...]:
        """The data files, relative paths taken from the recipe's folder."""
        paths = (self.data.path,) if isinstance(self.data.path, str) else self.data.path
        return tuple(self.folder / path for path in paths)

    @property
    def model(self) -> str | None:
        """The target as `spec_export.target.resolve` takes it."""
        model = self.target.model
        if model is not None and model.startswith(("./", "../")):
            return str(self.folder / model)
        return model

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON/TOML values by section, unset keys left out, paths as written."""
        sections = {name: getattr(self, name) for name in SECTIONS if getattr(self, name)}
        return {
            name: _plain(value if name == "drafter" else dataclasses.asdict(value))
            for name, value in sections.items()
        }

    def to_toml(self) -> str:
        """The recipe with every default spelled out; `parse` reads it back equal."""
        blocks = []
        for name, section in self.as_dict().items():
            lines = [f"{_key(key)} = {_toml(value)}" for key, value in section.items()]
            blocks.append("\n".join([f"[{name}]", *lines]))
        return "\n\n".join(blocks) + "\n"


SECTIONS: dict[str, type | None] = {
    "target": TargetSection,
    "drafter": None,
    "data": DataSection,
    "train": TrainSection,
    "export": ExportSection,
    "joint": JointSection,
}
OPTIONAL = ("joint",)  # absent means something else than all defaults


def load(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read the recipe at `path` with `overrides` ("section.key=value") applied; RecipeError names
    what is wrong."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"cannot read recipe {path}: {error}, expected a TOML file") from error
    return parse(text, overrides, folder=path.parent, where=str(path))


def parse(
    text: str, overrides: Sequence[str] = (), folder: Path = Path(), where: str = "recipe"
) -> Recipe:
    """Like `load`, from TOML text; `folder` is what relative data paths start from."""
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise RecipeError(f"{where} is not valid TOML: {error}") from error
    _refuse_unknown(tables, SECTIONS, where)
    for name, table in tables.items():
        _require(
            isinstance(table, dict), f"{where}: {name} is {table!r}, expected a section [{name}]"
        )
    for override in overrides:
        section, key, value = parse_override(override)
        if (section, key) == ("data", "path"):
            value = _from_working_folder(value, folder)
        tables.setdefault(section, {})[key] = value
    for name in ("drafter", "data", "train"):
        _require(name in tables, f"{where} has no section [{name}], expected {_listed(SECTIONS)}")
    built = {
        name: tables.get(name, {})
        if cls is None
        else build_config(cls, tables.get(name, {}), f"{where} [{name}]")
        for name, cls in SECTIONS.items()
        if name in tables or name not in OPTIONAL
    }
    return Recipe(**built, folder=folder)


def parse_override(text: str) -> tuple[str, str, Any]:
    """`"train.lr=3e-4"` → `("train", "lr", 0.0003)`. The value is TOML; what is not TOML is a bare
    string."""
    name, equals, value = text.partition("=")
    section, dot, key = name.strip().partition(".")
    if not (equals and dot and section and key):
        raise RecipeError(
            f"got override {text!r}, expected section.key=value such as train.lr=3e-4"
        )
    if section not in SECTIONS:
        raise RecipeError(
            f"override {text!r}: unknown section {section!r}, expected {_listed(SECTIONS)}"
        )
    value = value.strip()
    try:
        parsed = tomllib.loads(f"value = {value}")
        if parsed.keys() == {"value"}:
            return section, key, parsed["value"]
    except tomllib.TOMLDecodeError as error:
        # A bare word is meant as a string; an opening quote or bracket shows that TOML was meant.
        if value.startswith(('"', "'", "[", "{")):
            raise RecipeError(f"override {text!r}: not a TOML value: {error}") from error
    return section, key, value


def build_config(cls: type[T], mapping: Mapping[str, Any], where: str) -> T:
    """A frozen dataclass from a TOML/JSON mapping.

    Args:
        cls: dataclass whose field types are made of bool, int, float, str, Literal, tuple, list,
        dict and `| None`. mapping: its fields; lists become tuples where the field is one, integers
        become floats likewise. where: what to call the mapping in errors, such as "recipe.toml
        [drafter]".
    Raises:
        RecipeError: a key unknown (the known ones are listed) or missing, a value of another type,
        or a value
            that the class itself refuses in `__post_init__`.
    """
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init}  # type: ignore[arg-type]
    _refuse_unknown(mapping, fields, where)
    hints = typing.get_type_hints(cls)
    values = {}
    for name, value in mapping.items():
        try:
            values[name] = _converted(value, hints[name])
        except TypeError:
            expected = _type_name(hints[name])
            raise RecipeError(f"{where}: {name} is {value!r}, expected {expected}") from None
    for name, f in fields.items():
        required = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        _require(name in values or not required, f"{where}: key {name!r} is missing")
    try:
        return cls(**values)
    except RecipeError:
        raise
    except ValueError as error:
        raise RecipeError(f"{where}: {error}") from error


def _converted(value: Any, hint: Any) -> Any:
    """`value` as `hint` wants it; TypeError where it does not fit."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        # Exact matches first: `int | float` keeps 3 an integer whichever way round it is written.
        for option in sorted(arguments, key=lambda option: option is not type(value)):
            try:
                return _converted(value, option)
            except TypeError:
                continue
        raise TypeError
    if origin is Literal:
        if any(type(value) is type(option) and value == option for option in arguments):
            return value
        raise TypeError
    if origin in (tuple, list) or hint in (tuple, list):
        if not isinstance(value, (list, tuple)):
            raise TypeError
        container = origin or hint
        if not arguments:
            return container(value)
        if container is list or arguments[-1] is Ellipsis:
            return container(_converted(item, arguments[0]) for item in value)
        if len(arguments) != len(value):
            raise TypeError
        return tuple(
            _converted(item, option) for item, option in zip(value, arguments, strict=True)
        )
    if origin is dict or hint is dict:
        if not isinstance(value, Mapping):
            raise TypeError
        if not arguments:
            return dict(value)
        return {_converted(k, arguments[0]): _converted(v, arguments[1]) for k, v in value.items()}
    if hint is float and type(value) is int:
        return float(value)
    if hint is None or hint is type(None):
        if value is None:
            return None
        raise TypeError
    if type(value) is hint:  # exact, so that true is not an integer
        return value
    raise TypeError


def _type_name(hint: Any) -> str:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        # TOML cannot say None: "absent" is how a reader writes it.
        names = ["absent" if option is type(None) else _type_name(option) for option in arguments]
        return " or ".join(names)
    if origin is Literal:
        return "one of " + ", ".join(repr(option) for option in arguments)
    if origin in (tuple, list):
        if origin is list or arguments[-1] is Ellipsis:
            return f"a list of {_type_name(arguments[0])}"
        return "[" + ", ".join(_type_name(option) for option in arguments) + "]"
    return getattr(origin or hint, "__name__", str(hint))


def _refuse_unknown(mapping: Mapping[str, Any], known: Mapping[str, Any], where: str) -> None:
    unknown = [key for key in mapping if key not in known]
    if unknown:
        names = ", ".join(repr(key) for key in unknown)
        raise RecipeError(f"{where}: unknown key {names}, expected {_listed(known)}")


def _listed(known: Mapping[str, Any]) -> str:
    return ", ".join(known)


def _from_working_folder(value: Any, folder: Path) -> Any:
    """A data path typed on the command line starts from the working folder: restate it from the
    recipe's."""
    if isinstance(value, list):
        return [_from_working_folder(item, folder) for item in value]
    if not isinstance(value, str) or os.path.isabs(value):
        return value
    return Path(os.path.relpath(value, folder)).as_posix()


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items() if item is not None}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def _key(key: str) -> str:
    bare = key.isascii() and key.replace("_", "").replace("-", "").isalnum()
    return key if bare else _toml(key)


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, str):
        # TOML's basic string is JSON's, but for DEL, which TOML wants escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(k)} = {_toml(v)}" for k, v in value.items()) + "}"
    return str(value)  # TOML dates, which tomllib reads into datetime objects
