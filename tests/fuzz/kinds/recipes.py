"""Recipes: changed TOML and overrides; one that is taken is the same after a round trip."""

import json
import math
import re
from pathlib import Path
from typing import Any

import mutations
from cases import Kind, Refused, Run, Wrong, refusing
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

DOCUMENT: dict[str, Any] = {
    "target": {"model": "./llama"},
    "drafter": {
        "name": "parallelspec",
        "num_masks": 4,
        "taps": [1],
        "top_k": 10,
        "inputs": "features+tokens",
    },
    "data": {"path": ["a.jsonl", "b.jsonl"], "max_length": 512, "sources": ["x", ""]},
    "train": {
        "batch_tokens": 512,
        "lr": 1e-3,
        "betas": [0.9, 0.95],
        "warmup": 0.03,
        "epochs": 2.0,
        "max_steps": 100,
        "max_minutes": 3.5,
        "schedule": "cosine",
        "precision": "fp32",
        "seed": 0,
        "log_every": 10,
        "keep_checkpoints": 2,
        "weight_decay": 0.0,
        "grad_clip": 1.0,
    },
    "export": {"precision": "fp32", "draft_vocab": 80},
    "joint": {"lora_rank": 8, "backbone_lr": 5e-4, "drafter_ramp": "sine", "layer_dropout": 0.1},
}
KEYS = [f"{name}.{key}" for name, table in DOCUMENT.items() for key in table]


def cases() -> SearchStrategy[Any]:
    override = st.one_of(
        st.builds("{}={}".format, st.sampled_from(KEYS), mutations.numbers().map(_number)),
        st.builds("{}={}".format, st.sampled_from(KEYS), mutations.texts()),
        st.builds("{}={}".format, mutations.texts(6), mutations.texts()),
        mutations.texts(),
        st.sampled_from(("train.lr=" + "[" * 5000, "train.lr=1\ntrain.x=2", "a.b.c=1", "=", ".=")),
    )
    sources = st.one_of(
        st.fixed_dictionaries({"edits": mutations.edits()}),
        st.fixed_dictionaries({"edits": mutations.edits()}),
        st.fixed_dictionaries({"damage": mutations.damages()}),
        st.fixed_dictionaries({"overrides": st.lists(override, min_size=1, max_size=3)}),
    )
    return sources


def _number(value: int | float) -> str:
    """Returns a number as TOML writes it; Python refuses to print very long ones."""
    if isinstance(value, int) and abs(value) >= 10**300:
        return "1" + "0" * 400
    return str(value)


def _toml(value: Any) -> str:
    """Returns a value as TOML; None, which TOML cannot say, as an empty table."""
    if isinstance(value, mutations.Nested):
        return str(value)
    if value is None:
        return "{}"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return _number(value)
    if isinstance(value, str):
        text = json.dumps(value, ensure_ascii=False)
        return re.sub(r"[\x7f]", lambda found: f"\\u{ord(found[0]):04x}", text)
    if isinstance(value, list):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    pairs = (f"{_key(key)} = {_toml(item)}" for key, item in value.items())
    return "{" + ", ".join(pairs) + "}"


def _key(key: str) -> str:
    return json.dumps(key, ensure_ascii=False)


def to_toml(document: dict[str, Any]) -> str:
    """Returns a document of sections as TOML; other values stand first."""
    flat = [f"{_key(k)} = {_toml(v)}\n" for k, v in document.items() if not isinstance(v, dict)]
    for name, table in document.items():
        if isinstance(table, dict):
            flat.append(f"[{_key(name)}]\n")
            flat += [f"{_key(key)} = {_toml(value)}\n" for key, value in table.items()]
    return "".join(flat)


def open_kind(folder: Path) -> Run:
    from spec_export import drafters
    from spec_export.training import recipe as recipes

    drafters.load("parallelspec")  # imports torch now, not in the first case
    folder.mkdir(exist_ok=True)
    file = folder / "recipe.toml"
    whole = to_toml(DOCUMENT).encode()

    def run(case: dict[str, Any]) -> None:
        content = whole
        if "edits" in case:
            changed = mutations.edited(DOCUMENT, case["edits"])
            content = to_toml(changed).encode("utf-8", "surrogatepass")
        elif "damage" in case:
            content = mutations.damaged(whole, case["damage"])
        file.write_bytes(content)
        with refusing():
            recipe = recipes.load(file, case.get("overrides", []))
            module = drafters.load(recipe.drafter_name)
            config = recipes.build_config(module.Config, recipe.drafter_fields, "recipe [drafter]")
        _require_sensible(recipe)
        try:
            with refusing():
                again = recipes.parse(to_toml(recipe.as_dict()), folder=folder)
        except Refused as refused:
            raise Wrong(f"refuses what it has written itself: {refused}") from refused
        if (
            again != recipe
            or recipes.build_config(module.Config, again.drafter_fields, "recipe [drafter]")
            != config
        ):
            raise Wrong(f"differs after a round trip: {recipe} {again}")

    return run


def _require_sensible(recipe: Any) -> None:
    """Raises Wrong for values that no training survives."""
    train, joint = recipe.train, recipe.joint
    rates = [train.lr, train.grad_clip, train.weight_decay, *train.betas]
    rates += [joint.backbone_lr, joint.drafter_weight] if joint else []
    for value in rates[:1] + rates[2:]:
        if not math.isfinite(value):
            raise Wrong(f"takes a rate or weight that is not finite: {value}")


KIND = Kind("recipe", cases, open_kind, weight=14)
