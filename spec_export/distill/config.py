"""Holds the settings of one distillation run and the error that says what is wrong with them.

This file needs no torch, so that settings are refused before anything large is loaded.
"""

import importlib.util
import math
from dataclasses import dataclass
from pathlib import Path

from spec_export.distill import prompts
from spec_runtime.errors import UserError
from spec_runtime.files.installed import install

ENGINES = ("auto", "transformers", "openvino")
PRECISIONS = ("fp32", "bf16", "fp16")


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
        server: address of an OpenAI-compatible server that runs the target, in place of `engine`.
        shard: "i/n" writes the i-th of n parts of the rows, which `answers.merge` joins.
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
    server: str | None = None
    shard: str = "1/1"

    def __post_init__(self) -> None:
        for name in ("num_prompts", "turns", "max_new_tokens", "max_prompt_tokens", "batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"{name} is {value}, expected at least 1", param=name)
        wrong = [value for value in self.temperatures if not 0 <= value < math.inf]
        if wrong or not self.temperatures:
            text = f"temperature is {self.temperature}, expected 0 (greedy) or more"
            raise UserError(text, param="temperature")
        index, _, count = self.shard.partition("/")
        if not (index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count)):
            raise UserError(f"shard is {self.shard!r}, expected one like 1/4", param="shard")
        if self.server and not self.server.startswith(("http://", "https://")):
            text = f"server is {self.server!r}, expected an address like http://localhost:8000"
            raise UserError(text, param="server")
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
        if self.engine == "openvino" and not is_installed():
            raise UserError(
                f"engine openvino is not installed: {install('distill')}, or choose engine "
                "transformers"
            )

    @property
    def temperatures(self) -> tuple[float, ...]:
        """The temperatures that rows are drawn from."""
        return self.temperature if isinstance(self.temperature, tuple) else (self.temperature,)

    @property
    def part(self) -> tuple[int, int]:
        """The number of this shard, from 0 on, and how many there are."""
        index, count = map(int, self.shard.split("/"))
        return index - 1, count


def is_installed() -> bool:
    """Returns whether OpenVINO GenAI is there."""
    return importlib.util.find_spec("openvino_genai") is not None
