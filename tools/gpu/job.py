"""What the parts of tools/gpu/check.py share: sizes, bundles, prompts, and opened engines."""

import dataclasses
import gc
import importlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import spec_runtime
from spec_runtime.bundle import manifest as bundles
from spec_runtime.measure.prompts import BenchPrompt
from tools.gpu.report import LeftOut

# By device: the backend that runs there, and the precision of what is made for it here.
BACKEND_FOR = {"cpu": "onnxruntime", "cuda": "cuda"}
PRECISION_FOR = {"cpu": "fp32", "cuda": "fp16"}
SMALL_LOGITS = "small-logits.npy"  # f32[P, V] behind each of the texts that are kept


@dataclass(frozen=True)
class Shape:
    """The dimensions of a Llama."""

    name: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    def options(self) -> dict[str, int]:
        """Returns the dimensions by transformers' names."""
        names = {"num_layers": "num_hidden_layers", "num_heads": "num_attention_heads"}
        names["num_kv_heads"] = "num_key_value_heads"
        sizes = dataclasses.asdict(self)
        del sizes["name"]
        return {names.get(key, key): size for key, size in sizes.items()}


@dataclass(frozen=True)
class Sizes:
    """Says how much is measured.

    `bundle` is the shape that a target is inflated to, where no bundle is given. Chains of `widths`
    nodes are verified after `context` tokens. `scattered` are heads and their width.
    """

    bundle: Shape
    lanes: int
    num_prompts: int
    num_audited: int
    audited_tokens: int
    bench_tokens: int
    context: int
    widths: tuple[int, ...]
    repeats: int
    scattered: tuple[tuple[int, int], ...]


LARGE = Shape("llama-3-8b", 128_256, 4096, 14_336, 32, 32, 8, 128)
SMALL = Shape("small", 49_408, 1152, 2048, 32, 16, 4, 128)
REAL = Sizes(LARGE, 8, 8, 4, 64, 256, 1024, (1, 4, 8, 16, 32), 20, ((8, 128), (32, 128)))
TINY = Shape("toy", 130, 128, 128, 3, 8, 4, 64)
TOY = Sizes(TINY, 2, 2, 2, 16, 16, 80, (1, 4, 8), 2, ((2, 16),))


@dataclass
class Check:
    """Holds what is checked, and what parts leave for later ones.

    `given` are the folders that the part "bundle" reads, and `opened` what it has read for the
    others. Where none is given it inflates `model`, or the demo, with its `drafter`; `kept` has the
    larger "checkpoint", and "texts" that the small model gives these "answers" to. `limits` are the
    rounding between forms of a row, by bundle.
    """

    opened: list[bundles.Bundle]
    prompts: list[BenchPrompt]
    device: str
    sizes: Sizes
    work: Path
    given: list[Path] = field(default_factory=list)
    model: str | None = None
    drafter: str | None = None
    kept: dict[str, Any] = field(default_factory=dict)
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


def needed(package: str) -> Any:
    """Returns a package; raises LeftOut if it is not installed."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise LeftOut(f"this needs {package}: {error}") from error


def torch_on(device: str) -> Any:
    """Returns torch; raises LeftOut if it cannot use this device."""
    torch = needed("torch")
    if device == "cuda" and not torch.cuda.is_available():
        raise LeftOut("torch has no GPU here")
    return torch


def label(opened: bundles.Bundle) -> str:
    """Returns the bundle's name, precision, and form and attention of its graphs if unusual."""
    graph = opened.manifest.graphs["target"]
    words = [opened.manifest.name, opened.manifest.target.precision]
    words += [
        word for word in (graph.form, graph.attention) if word not in ("slots", "bias", "append")
    ]
    return " ".join(words)


def contenders(opened: bundles.Bundle) -> list[str]:
    """Returns the names of the bundle's drafters and prompt lookup, the shipped one first."""
    return [*(drafter.name for drafter in opened.manifest.drafters), "prompt_lookup"]
