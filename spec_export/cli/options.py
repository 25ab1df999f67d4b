"""Defines the options that several verbs take."""

from enum import StrEnum
from typing import Annotated

import typer


class Precision(StrEnum):  # typer takes no list of literals
    fp32 = "fp32"
    int8 = "int8"
    int4 = "int4"
    fp16 = "fp16"
    bf16 = "bf16"
    fp8 = "fp8"


def require_model(model: str | None) -> str | None:
    """Refuses a wrong path or an unknown family before torch is imported, which takes seconds."""
    from spec_export.model import files

    if model is not None:
        files.require(model)
    return model


Target = Annotated[
    str | None,
    typer.Option(
        "--target",
        help="Hugging Face folder, hub id or GGUF file of the target",
        show_default="the built-in demo",
        callback=require_model,
    ),
]
Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="Hugging Face folder, hub id, GGUF file or LoRA adapter's folder",
        show_default="the built-in demo",
        callback=require_model,
    ),
]

Base = Annotated[
    str | None,
    typer.Option(
        "--base",
        help="Base model of the adapter that --model names, given as a model is",
        show_default="the one that the adapter names",
        callback=require_model,
    ),
]
