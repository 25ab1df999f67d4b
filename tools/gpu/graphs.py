"""Makes, feeds and times graphs of random targets for tools/gpu/check.py."""

import dataclasses
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from spec_runtime import backends
from spec_runtime.backends.shapes import is_cache
from spec_runtime.bundle import manifest as bundles
from spec_runtime.loop.kv import open_cache
from spec_runtime.loop.target import PREFILL_ROWS
from spec_runtime.trees.tree import chain_parents

# By device: the backend that runs there, and the precision of what is made for it here.
BACKEND_FOR = {"cpu": "onnxruntime", "cuda": "cuda"}
PRECISION_FOR = {"cpu": "fp32", "cuda": "fp16"}
SCRATCH = 128
# These have a cache, none, features of their own and states of their own.
TOY_DRAFTERS = ("parallelspec", "medusa", "eagle", "hydra")
RANDOM_CONTEXT = 256
WARM_UP = 6  # runs before the clock starts: kernels are chosen, a CUDA graph is captured


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


# ---------------------------------------------------------------------------------------- feeds


class Feeder:
    """Makes random but valid feeds of one graph, over a cache of its own.

    Every feeder of a graph makes the same feeds.
    """

    def __init__(
        self, graph: bundles.Graph, capacity: int, vocab_size: int, num_levels: int = 1
    ) -> None:
        self._graph, self._vocab_size, self._num_levels = graph, vocab_size, num_levels
        self._cache = None
        if graph.form != "stateless":
            self._cache = open_cache(graph.form, capacity)
        self._rng = np.random.default_rng(0)
        self._level = 0

    def feeds(self, parent_N: np.ndarray) -> dict[str, np.ndarray]:
        """Returns feeds for a tree after the rows that were kept.

        Raises ValueError for an input of no known meaning.
        """
        n = len(parent_N)
        feeds = {} if self._cache is None else self._cache.place(parent_N)
        for spec in self._graph.inputs:
            if spec.name in feeds or is_cache(spec):
                continue
            shape = tuple(n if isinstance(axis, str) else axis for axis in spec.shape)
            if spec.name == "input_ids":
                feeds[spec.name] = self._rng.integers(self._vocab_size, size=shape)
            elif spec.name == "logit_rows":
                feeds[spec.name] = np.arange(n, dtype=np.int64)
            elif spec.name == "level":
                feeds[spec.name] = np.full(shape, self._level % self._num_levels, np.int64)
            elif spec.name == bundles.BANK_ROWS:
                feeds[spec.name] = np.arange(shape[0], dtype=np.int64)
            elif spec.name in (bundles.FEATURE_ROWS, bundles.STATE_ROWS):
                # Never rows that the run writes: a captured run is run three times.
                feeds[spec.name] = n + self._rng.integers(SCRATCH // 2, size=shape)
                if spec.name == bundles.FEATURE_ROWS:  # one feature of its own, or zeros
                    feeds[spec.name][-1] = -1 - n
            elif spec.name in ("features", "state", "logits"):
                feeds[spec.name] = self._rng.standard_normal(shape, np.float32)
            else:
                raise ValueError(f"got input {spec.name}, which this script has no feeds for")
        self._level += 1
        return feeds

    def keep(self, path: Sequence[int]) -> None:
        """Keeps the rows of these nodes of the last feeds, which must have been run once."""
        if self._cache is not None:
            self._cache.commit(path)

    def prefill(self, backend: backends.Backend, num_rows: int) -> None:
        """Runs and keeps `num_rows` rows, in chunks."""
        for begin in range(0, num_rows, PREFILL_ROWS):
            n = min(PREFILL_ROWS, num_rows - begin)
            backend.run(self.feeds(chain_parents(n)), [])
            self.keep(range(n))


def row_errors(got: np.ndarray, expected: np.ndarray) -> list[float]:
    """Returns the largest |Δ| of each row over the row's range, or over 1 if the range is less."""
    got, expected = (x.reshape(-1, x.shape[-1]).astype(np.float64) for x in (got, expected))
    spread = np.maximum(np.ptp(expected, axis=1), 1.0)
    errors: list[float] = (np.abs(got - expected).max(axis=1) / spread).tolist()
    return errors


def milliseconds(
    backend: backends.Backend, feeds: dict[str, np.ndarray], outputs: Sequence[str], repeats: int
) -> float:
    """Returns the median time of a run, with the copies of feeds and outputs in it."""
    times = []
    for i in range(WARM_UP + repeats):
        begin = time.perf_counter()
        backend.run(feeds, outputs)
        if i >= WARM_UP:
            times.append(time.perf_counter() - begin)
    return 1000 * statistics.median(times)


# --------------------------------------------------------------------------------- random graphs


def random_backbone(shape: Shape, context: int, precision: str) -> Any:
    """Returns the decoder of a random Llama of this shape."""
    import torch

    from spec_export.model.decoder import Backbone

    dtype = {"fp32": torch.float32, "fp16": torch.float16}[precision]
    model = random_llama(shape, shape.hidden_size**-0.5).to(dtype)
    return Backbone.from_transformers(model, max_length=context, scratch=SCRATCH).eval()


def trace_target(backbone: Any) -> Any:
    """Returns the backbone's graph in the contiguous form, as a build for a device traces it."""
    from spec_export.graphs import banks, trace

    return banks.add_argmax(trace.export_backbone(backbone))


def write_target(traced: Any, attention: str, path: Path) -> bundles.Graph:
    """Writes the graph in the slots form with one of bundle.manifest.ATTENTIONS.

    `traced` itself is not changed.
    """
    from spec_export.build.writer import save_graph
    from spec_export.graphs import banks, slots

    model = traced.clone()
    banks.keep_target(slots.to_slots(model, attention))
    graph = save_graph(model, "slots", path.parent, path.name)
    return dataclasses.replace(graph, attention=attention)


def open_alone(graph: bundles.Graph, folder: Path, capacity: int, device: str) -> backends.Backend:
    """Opens a graph that belongs to no bundle, as a bundle's backend would open it."""
    path = folder / graph.file
    if device == "cpu":
        from spec_runtime.backends.cpu.backend import CpuBackend

        return CpuBackend(path, graph, capacity)
    from spec_runtime.backends.cuda.backend import CudaBackend

    return CudaBackend(path, graph, capacity, has_cuda_graphs=True)


# -------------------------------------------------------------------------------------- a bundle


def random_bundle(folder: Path, shape: Shape, device: str) -> Path:
    """Builds a bundle of a random target whose tokens are characters, and returns its folder.

    It has an untrained drafter of each kind.
    """
    import torch

    from spec_export import drafters
    from spec_export.build import make_bundle
    from spec_export.build.make_bundle import BuildOptions
    from spec_export.model import target
    from spec_export.model.decoder import Backbone
    from spec_export.training import checkpoint

    model = random_target(folder / shape.name, shape)
    ends = target.ends(Backbone.from_transformers(model))
    saved = []
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for name in TOY_DRAFTERS:
            definition = drafters.load(name)
            module = definition.Drafter(definition.Config(), ends)
            state = module.state_dict()
            saved.append(checkpoint.save_drafter(folder / name, state, name, module.config, {}))
    return make_bundle.build(
        BuildOptions(
            str(folder / shape.name),
            drafter_checkpoints=saved,
            precision=PRECISION_FOR[device],
            device=device,
            out=folder / "bundle",
            lanes=2,
        )
    )


def random_target(folder: Path, shape: Shape) -> Any:
    """Writes a random Llama of this shape, whose tokens are characters, and returns it."""
    import tokenizers
    import transformers

    vocabulary = {"<s>": 0, "</s>": 1, **{chr(i): i - 30 for i in range(32, 126)}}
    vocabulary |= {f"<{i}>": i for i in range(len(vocabulary), shape.vocab_size)}
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    inner.decoder = tokenizers.decoders.Fuse()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>"
    )
    model = random_llama(shape)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model


def random_llama(shape: Shape, deviation: float = 0.3) -> Any:
    """Returns a Llama of this shape, whose weights have this standard deviation."""
    import torch
    import transformers

    config = transformers.LlamaConfig(
        **shape.options(),
        max_position_embeddings=RANDOM_CONTEXT,
        initializer_range=deviation,
        bos_token_id=0,
        eos_token_id=1,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return transformers.LlamaForCausalLM(config)
