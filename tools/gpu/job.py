"""What the parts of tools/gpu/check.py share: sizes, bundles, prompts, and opened engines."""

import gc
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import spec_runtime
from spec_runtime.bundle import manifest as bundles
from spec_runtime.measure.prompts import NO_CATEGORY, BenchPrompt
from tools.gpu.graphs import BACKEND_FOR, Shape


@dataclass(frozen=True)
class Sizes:
    """Says how much is measured.

    `bundle` are the dimensions of the random target, where no bundle is given. `contexts` and
    `widths` are the slots and rows at which forms of `attention` are compared.
    """

    bundle: Shape
    num_prompts: int
    num_audited: int
    audited_tokens: int
    bench_tokens: int
    contexts: tuple[int, ...]
    widths: tuple[int, ...]
    repeats: int
    attention: Shape


REAL = Sizes(
    bundle=Shape("random", 32_000, 576, 1536, 8, 9, 3, 64),
    num_prompts=12,
    num_audited=4,
    audited_tokens=64,
    bench_tokens=128,
    contexts=(1024, 2048, 4096),
    widths=(1, 4, 8, 16, 32, 64),
    repeats=20,
    attention=Shape("four layers", 1024, 1024, 1024, 4, 32, 8, 128),
)
TINY = Shape("toy", 96, 64, 96, 2, 4, 2, 16)
TOY = Sizes(TINY, 2, 2, 16, 16, (80, 96), (1, 4, 8), 2, TINY)
# For a random target, whose tokens are characters.
RANDOM_PROMPTS = [
    BenchPrompt(i, NO_CATEGORY, text)
    for i, text in enumerate(
        ("abc abc abc abc", "one two one two one", "Explain tides to a child.", "x = x + 1; " * 8),
        1,
    )
]


@dataclass
class Check:
    """Holds what is checked, and what parts leave for later ones.

    `given` are the folders that the part "bundle" reads, and `opened` what it has read for the
    others. `limits` are the rounding between forms of a row, by bundle.
    """

    opened: list[bundles.Bundle]
    prompts: list[BenchPrompt]
    device: str
    sizes: Sizes
    work: Path
    given: list[Path] = field(default_factory=list)
    limits: dict[str, float] = field(default_factory=dict)
    _engines: dict[tuple[Path, str], spec_runtime.Engine] = field(default_factory=dict)

    def engine(self, opened: bundles.Bundle, name: str) -> spec_runtime.Engine:
        """Returns the engine of a contender, see `contenders`, opened once; all share a target."""
        key = (opened.path, name)
        if key not in self._engines:
            if name == "none":
                self._engines[key] = open_engine(opened, BACKEND_FOR[self.device])
            else:
                self._engines[key] = self.engine(opened, "none").with_drafter(name)
        return self._engines[key]

    def close(self) -> None:
        """Drops all engines, and the memory they hold."""
        self._engines.clear()
        gc.collect()  # engines and their parts name one another


def open_engine(opened: bundles.Bundle, backend: str) -> spec_runtime.Engine:
    """Returns an engine without a drafter, and without what was measured of this machine."""
    options: Any = {"verify": False, "profile": False, "backend": backend}
    return spec_runtime.load(opened.path, "none", **options)


def label(opened: bundles.Bundle) -> str:
    """Returns the bundle's name, precision, and form and attention of its graphs if unusual."""
    graph = opened.manifest.graphs["target"]
    words = [opened.manifest.name, opened.manifest.target.precision]
    words += [word for word in (graph.form, graph.attention) if word not in ("slots", "bias")]
    return " ".join(words)


def contenders(opened: bundles.Bundle) -> list[str]:
    """Returns the names of the bundle's drafters and prompt lookup, the shipped one first."""
    return [*(drafter.name for drafter in opened.manifest.drafters), "prompt_lookup"]
