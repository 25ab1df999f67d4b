"""The field: who is measured at which precision, in which modes, on which weights, and who is not.

Every mode here is lossless by its method: it writes what the same engine writes plainly, up to the
rounding of its own products. Whether it does is counted (see report.py), not assumed.
"""

import dataclasses
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tools.measure.rivals.environments import GENAI, LLAMA_CPP, OPENVINO, TRANSFORMERS, Environment
from tools.measure.rivals.models import TargetFiles

PRECISIONS = ("fp32", "int8", "int4")
OURS = "specsplit"
PLAIN = "plain"
WORKERS = Path(__file__).parent / "workers"


@dataclass(frozen=True)
class Form:
    """The model that a rival reads at one precision.

    Forms with the same `weights` hold the same values, so that greedy texts should be the same.
    """

    weights: str
    write: Callable[[TargetFiles], Path]


@dataclass(frozen=True)
class Rival:
    """An engine beside ours: its environment, its worker, its modes, and a form by precision."""

    name: str
    title: str
    environment: Environment
    worker: str
    modes: tuple[str, ...]
    forms: Mapping[str, Form]


@dataclass(frozen=True)
class Contender:
    """One engine in one mode at one precision: what one worker process runs."""

    name: str
    engine: str
    mode: str
    weights: str
    command: tuple[str, ...]  # without the settings, which the worker takes as one argument
    settings: Mapping[str, Any]

    @property
    def is_ours(self) -> bool:
        return self.engine == OURS


def _gguf(kind: str, weights: str | None = None) -> Form:
    return Form(weights or kind, lambda files: files.gguf(kind))


FLOAT32 = "float32"
RIVALS = (
    Rival(
        "transformers",
        "transformers",
        TRANSFORMERS,
        "transformers_worker.py",
        (PLAIN, "lookup"),
        {"fp32": Form(FLOAT32, TargetFiles.hugging_face)},
    ),
    Rival(
        "genai",
        "onnxruntime-genai",
        GENAI,
        "genai_worker.py",
        (PLAIN,),
        {
            "fp32": Form(FLOAT32, lambda files: files.genai("fp32")),
            "int8": Form("its builder's int8", lambda files: files.genai("int8")),
            "int4": Form("its builder's int4", lambda files: files.genai("int4")),
        },
    ),
    Rival(
        "openvino",
        "OpenVINO GenAI",
        OPENVINO,
        "openvino_worker.py",
        (PLAIN, "lookup"),
        {
            # It reads no GGUF file in F32; F16 keeps the dequantised weights to 11 bits.
            "fp32": _gguf("F16", "float16, computed in float32"),
            "int8": _gguf("Q8_0"),
            "int4": _gguf("Q4_1", "Q4_1, offsets rounded by its reader"),
        },
    ),
    Rival(
        "openvino-nncf",
        "OpenVINO GenAI with NNCF",
        OPENVINO,
        "openvino_worker.py",
        (PLAIN, "lookup"),
        {
            "int8": Form("NNCF's int8, a scale a row", lambda files: files.openvino("int8")),
            "int4": Form("NNCF's int4, groups of 32", lambda files: files.openvino("int4")),
        },
    ),
    Rival(
        "llama.cpp",
        "llama.cpp",
        LLAMA_CPP,
        "llama_worker.mjs",
        (PLAIN, "lookup"),
        {"fp32": _gguf("F32", FLOAT32), "int8": _gguf("Q8_0"), "int4": _gguf("Q4_1")},
    ),
)

ALONE, LANES = "one at a time", "lanes"
# Our modes: the drafter to load (None: the bundle's default), whether lookup is merged into it, and
# how many calls are answered at a time (None: one by the engine itself).
Mode = tuple[str | None, bool | None, int | None]
OUR_MODES: dict[str, Mode] = {
    PLAIN: ("none", None, None),
    "lookup": ("prompt_lookup", None, None),
    "drafter": (None, False, None),
    "drafter + lookup": (None, True, None),
}
# The demo's int4 holds a Q4_1 file's values as they are; int8 has one scale a row.
OUR_WEIGHTS = {"fp32": FLOAT32, "int8": "int8, a scale a row", "int4": "Q4_1"}


@dataclass(frozen=True)
class Options:
    """What all contenders are given alike: `max_length` is the context that is set aside. Answers
    that `may_end` end with the text."""

    threads: int
    end_ids: tuple[int, ...]
    max_length: int
    lookup_tokens: int
    lookup_ngram: int
    may_end: bool


def for_many(precision: str) -> list[Rival]:
    """Returns those of `RIVALS` that answer several at a time, in their modes for that: OpenVINO
    with its default precisions and, at fp32, in float32, too; llama.cpp without lookup."""
    exact = (f"{PLAIN} in f32", "lookup in f32") if precision == "fp32" else ()
    modes = {OPENVINO.name: (PLAIN, "lookup", *exact), LLAMA_CPP.name: (PLAIN,)}
    found = [each for each in RIVALS if each.environment.name in modes]
    return [replace(each, modes=modes[each.environment.name]) for each in found]


def our_modes_for_many(parallel: int) -> dict[str, Mode]:
    """Returns our modes for many clients: one call at a time, several, and these undrafted."""
    return {
        ALONE: (None, None, 1),
        LANES: (None, None, parallel),
        f"{LANES}, {PLAIN}": ("none", None, parallel),
    }


def of_rival(rival: Rival, precision: str, files: TargetFiles, options: Options) -> list[Contender]:
    """Returns a contender for each mode of a rival; makes its environment and model first.

    Returns none for a precision that the rival has not. Raises RivalError if either fails.
    """
    if precision not in rival.forms:
        return []
    rival.environment.make(files.work)
    form = rival.forms[precision]
    program = str(rival.environment.program(files.work))
    model = str(form.write(files).absolute())
    settings = {
        **dataclasses.asdict(options),
        "engine": rival.name,
        "precision": precision,
        "model": model,
        "packages": str(rival.environment.folder(files.work).absolute()),
        "version": rival.environment.version,
    }
    return [
        Contender(
            f"{rival.title}, {mode}",
            rival.name,
            mode,
            form.weights,
            (program, str(WORKERS / rival.worker)),
            {**settings, "mode": mode},
        )
        for mode in rival.modes
    ]


def ours(
    bundle: Path,
    precision: str,
    options: Options,
    modes: Mapping[str, Mode],
    profile: bool,
    is_demo: bool = True,
) -> list[Contender]:
    """Returns a contender for each of our modes; their workers run under this interpreter."""
    command = (sys.executable, str(WORKERS / "ours_worker.py"))
    weights = OUR_WEIGHTS[precision] if is_demo or precision != "int4" else "int4, zero points"
    common = {**dataclasses.asdict(options), "model": str(bundle.absolute()), "profile": profile}
    found = []
    for mode, (drafter, lookup, parallel) in modes.items():
        own = {"drafter": drafter, "lookup": lookup, "parallel": parallel}
        name = f"{OURS}, {mode}"
        found.append(Contender(name, OURS, mode, weights, command, {**common, **own}))
    return found
