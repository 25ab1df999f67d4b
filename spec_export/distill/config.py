"""Holds the settings of one distillation run and the error that says what is wrong with them.

This file needs no torch, so that settings are refused before anything large is loaded.
"""

import importlib.util
import math
from dataclasses import dataclass
from pathlib import Path

from spec_export.distill import prompts
from spec_runtime.errors import UserError
from spec_runtime.files.installed import install, program

ENGINES = ("auto", "transformers", "openvino", "vllm")
PRECISIONS = ("fp32", "bf16", "fp16")
# The engines that have to be installed: their packages, and how to get them.
PACKAGES = {
    "openvino": ("openvino_genai", lambda: install("distill")),
    "vllm": ("vllm", lambda: f"{program('pip')} install vllm"),
}


@dataclass(frozen=True)
class DistillConfig:
    """The settings of one distillation run.

    Attributes:
        model: the target as `target.resolve` takes it; None means the demo.
        base: of the adapter that `model` names, None for the one that it names itself.
        out: the JSON Lines file to write; its sidecar is `<out>.state.json`.
        prompts: JSON Lines of {"prompt": text or ids}, or {"turns": [text or ids, …]} with all user
            messages of a conversation, with an optional "source"; None lets the target sample its
            own. Prompts that the context has no room for are skipped.
        num_prompts: rows to write; None means the whole prompts file, or 1000 sampled ones.
        turns: user messages of the longest conversation. Where the prompts give fewer, the target
            samples the rest.
        max_new_tokens: tokens of the longest answer, end token included.
        max_prompt_tokens: tokens of the longest sampled prompt; longer ones are left out.
        temperature: the answers' sampling temperature; 0 is greedy. Of several, the seed draws
            one for each row, so that each gets about the same share of the rows.
        batch_size: prompts that the engine gets at once; an interruption loses at most these.
        resume: go on with `out` if it exists already; without it that is an error.
    """

    model: str | None
    out: Path
    prompts: Path | None = None
    num_prompts: int | None = None
    turns: int = 1
    max_new_tokens: int = 256
    max_prompt_tokens: int = 128
    temperature: float | tuple[float, ...] = 0.0
    seed: int = 0
    batch_size: int = 64
    engine: str = "auto"
    precision: str = "fp32"
    resume: bool = True
    base: str | None = None

    def __post_init__(self) -> None:
        for name in ("num_prompts", "turns", "max_new_tokens", "max_prompt_tokens", "batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"{name} is {value}, expected at least 1", param=name)
        wrong = [value for value in self.temperatures if not 0 <= value < math.inf]
        if wrong or not self.temperatures:
            text = f"temperature is {self.temperature}, expected 0 (greedy) or more"
            raise UserError(text, param="temperature")
        for name, known in (("engine", ENGINES), ("precision", PRECISIONS)):
            if getattr(self, name) not in known:
                text = f"{name} is {getattr(self, name)!r}, expected one of {', '.join(known)}"
                raise UserError(text, param=name)

    def require_files(self) -> None:
        """Raises UserError unless the prompts can be read, the answers may be written, and the
        engine is installed."""
        if self.prompts is not None:
            prompts.read(self.prompts)
        if self.out.exists() and not self.resume:
            raise UserError(f"{self.out} exists: resume it, remove it or choose another file")
        if self.engine in PACKAGES and not is_installed(self.engine):
            raise UserError(
                f"engine {self.engine} is not installed: {PACKAGES[self.engine][1]()}, or choose "
                "engine transformers"
            )

    @property
    def temperatures(self) -> tuple[float, ...]:
        """The temperatures that rows are drawn from."""
        return self.temperature if isinstance(self.temperature, tuple) else (self.temperature,)


def is_installed(engine: str) -> bool:
    """Returns whether the package of an engine is there."""
    return importlib.util.find_spec(PACKAGES[engine][0]) is not None
