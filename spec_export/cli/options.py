"""Defines the options that several verbs take."""

from enum import StrEnum
from typing import Annotated

import typer


class Precision(StrEnum):
    fp32 = "fp32"
    int8 = "int8"
    int4 = "int4"
    fp16 = "fp16"
    bf16 = "bf16"


class Form(StrEnum):
    slots = "slots"
    contiguous = "contiguous"


class Device(StrEnum):
    cpu = "cpu"
    cuda = "cuda"


class Backend(StrEnum):
    onnxruntime = "onnxruntime"
    tensorrt = "tensorrt"


Model = Annotated[
    str | None,
    typer.Option(
        "--model", help="Hugging Face folder, hub id or GGUF file", show_default="the built-in demo"
    ),
]
