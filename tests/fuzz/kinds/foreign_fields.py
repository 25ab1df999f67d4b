"""Strangers' drafters, adapters and quantised models: every declared field with hostile values."""

import json
import shutil
import typing
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import mutations
from cases import Kind, Run, Wrong, refusing
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

INDEX = "model.safetensors.index.json"
OWN, BASE = "@own folder@", "@its base@"  # stand for paths
PATTERNS = (
    "(a|aa)+$",
    r"(.|..)+x",
    "(.*)*" * 20 + "z",
    "(",
    "q_proj",
    ".*",
    "^model",
    r"a\.b",
    "é",
)
NAMES = ("../model.safetensors", "/etc/passwd", "model.safetensors", "a" * 5000, "x\x00y")
TEXTS = (
    *("default", "linear", "yarn", "llama3", "longrope", "silu", "llama", "qwen3", "mixtral"),
    *("full_attention", "sliding_attention", "gptq", "awq", "compressed-tensors", "fp8", "mxfp4"),
    *("eagle3", "peagle", "dflash", "dspark", "gptq_v2", "int-quantized", "gaussian"),
)
SIZES = (2, 16, 17, 1024, 1025, 10_000_000, 1 << 24, 1 << 40)
DRAFTERS = (
    *("EAGLE-3", "speculators", "P-EAGLE", "DFlash 2", "DSpark", "Medusa 1", "Medusa 2"),
    *("EAGLE-1", "PARD"),
)
QUANTISED = ("GPTQ", "AWQ", "packed", "int8", "FP8", "MLX", "bitsandbytes")


def declared(kind: Any) -> Iterator[list[str]]:
    """Yields the places of all fields that a TypedDict declares, nested ones too."""
    for name, annotation in typing.get_type_hints(kind).items():
        yield [name]
        for inner in _typed_dicts(annotation):
            for place in declared(inner):
                yield [name, *place]


def _typed_dicts(annotation: Any) -> Iterator[Any]:
    if hasattr(annotation, "__total__"):
        yield annotation
    for part in typing.get_args(annotation):
        yield from _typed_dicts(part)


def _cases(sources: tuple[str, ...], files: tuple[str, ...]) -> SearchStrategy[Any]:
    """Draws changes of fields of JSON files, or of the headers of the weights."""
    from spec_export.model import foreign_json

    kinds = {
        "config.json": foreign_json.CONFIG,
        "adapter_config.json": foreign_json.ADAPTER,
        "generation_config.json": foreign_json.GENERATION,
        "tokenizer_config.json": foreign_json.TOKENIZER,
        INDEX: foreign_json.INDEX,
    }
    hostile = st.one_of(
        mutations.values(),
        st.sampled_from((*PATTERNS, *NAMES, OWN, BASE)),
        st.sampled_from(SIZES),
        st.dictionaries(st.sampled_from(PATTERNS), mutations.numbers(), max_size=2),
        st.lists(st.integers(-1, 9) | st.just("full_attention"), max_size=8),
    )
    likely = st.one_of(
        st.none(), st.booleans(), st.integers(0, 9), st.floats(0.01, 4), st.sampled_from(TEXTS)
    )
    value = hostile | likely | likely.flatmap(lambda one: st.lists(st.just(one), max_size=8))
    known = [name for name in files if name != INDEX]  # an index of nothing is no sound file
    unknown = st.tuples(st.sampled_from(known), st.just(["made_up"]), value).map(list)
    field = st.one_of(
        [
            st.tuples(st.just(file), st.sampled_from(list(declared(kinds[file]))), value).map(list)
            for file in files
        ]
    )
    source, fields = st.sampled_from(sources), st.lists(field, min_size=1, max_size=3)
    # other people's files have fields that we do not know, which are left alone
    left_alone = st.lists(unknown, min_size=1, max_size=1)
    return st.one_of(
        st.fixed_dictionaries({"source": source, "fields": fields}),
        st.fixed_dictionaries({"source": source, "fields": fields}),
        st.fixed_dictionaries({"source": source, "fields": left_alone}),
        st.fixed_dictionaries({"source": source, "tensors": mutations.edits(2)}),
    )


def _changed(folder: Path, case: dict[str, Any], base: Path) -> None:
    from foreign_sources import WEIGHTS

    from kinds.checkpoints import _with_header

    if "tensors" in case:
        path = next(folder / name for name in WEIGHTS if (folder / name).is_file())
        content = _with_header(path.read_bytes(), case["tensors"])
        path.unlink()  # a link to the sound weights
        path.write_bytes(content)
    documents: dict[Path, Any] = {}
    for name, place, value in case.get("fields", ()):
        path = folder / name
        if path not in documents:
            documents[path] = json.loads(path.read_text()) if path.is_file() else {}
        at = documents[path]
        for key in place[:-1]:
            if not isinstance(at.get(key), dict):
                at[key] = {}
            at = at[key]
        paths = {OWN: str(folder), BASE: str(base)}
        at[place[-1]] = paths.get(value, value) if isinstance(value, str) else value
    for path, document in documents.items():
        path.write_text(mutations.dump(mutations.expand(document)))


def _open(folder: Path, *, is_target: bool) -> Run:
    import logging
    import warnings

    import foreign_sources
    import torch
    import transformers

    from spec_export.imports.drafters import importer
    from spec_export.model import target
    from spec_export.training.checkpoint import load_drafter

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    sources = foreign_sources.write_sources(folder)
    place, out = folder / "changed", folder / "out"

    def run(case: dict[str, Any]) -> None:
        shutil.rmtree(out, ignore_errors=True)
        source = case["source"]
        foreign_sources.copy(sources[source], place)
        _changed(place, case, sources["llama"])
        if is_target:
            with refusing():
                model, _ = target.load(target.resolve(str(place)))
            if not all(torch.isfinite(each).all() for each in model.state_dict().values()):
                raise Wrong("weights that are not finite are taken")
            return
        sound = sources["six" if source in ("DFlash 2", "DSpark") else "llama"]
        with refusing():
            importer.run(str(place), str(sound), out, is_measured=False)
        load_drafter(out)  # what was written can be read

    return run


CONFIGS = ("config.json", "generation_config.json", "tokenizer_config.json")
LIMITS: dict[str, Any] = {"weight": 1, "seconds": 20, "megabytes": 1536}
KINDS = (
    Kind(
        "drafter config",
        partial(_cases, DRAFTERS, ("config.json",)),
        partial(_open, is_target=False),
        **LIMITS,
    ),
    Kind(
        "adapter",
        partial(_cases, ("adapter",), ("adapter_config.json",)),
        partial(_open, is_target=True),
        **LIMITS,
    ),
    Kind(
        "quantised model",
        partial(_cases, (*QUANTISED, "llama", "experts"), (*CONFIGS, INDEX)),
        partial(_open, is_target=True),
        **LIMITS,
    ),
)
