"""Graphs in tests: save a model, open it on ONNX Runtime, run trees over a cache."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from spec_export.graphs.trace import save
from spec_runtime.backends.cpu.backend import CpuBackend
from spec_runtime.bundle.manifest import Graph, TensorSpec
from spec_runtime.loop.kv import open_cache


def graph_of(
    model: ir.Model, form: str, file: str = "graph.onnx", attention: str = "bias"
) -> Graph:
    """Returns the manifest entry of this model."""

    def specs(values: Any) -> tuple[TensorSpec, ...]:
        return tuple(
            TensorSpec(
                value.name,
                str(value.dtype.numpy()),
                tuple(size if isinstance(size, int) else str(size.value) for size in value.shape),
            )
            for value in values
        )

    inputs, outputs = specs(model.graph.inputs), specs(model.graph.outputs)
    return Graph(file, form, inputs, outputs, attention=attention)


def open_model(
    model: ir.Model, folder: Path, form: str, capacity: int, attention: str = "bias"
) -> CpuBackend:
    """Saves the model to `folder` and opens it with one thread."""
    path = folder / "graph.onnx"
    save(model, path)
    return CpuBackend(path, graph_of(model, form, attention=attention), capacity, threads=1)


class Runner:
    """Runs a graph together with the cache that feeds it."""

    def __init__(
        self,
        model: ir.Model,
        folder: Path,
        form: str = "slots",
        capacity: int = 96,
        attention: str = "bias",
    ):
        self.backend = open_model(model, folder, form, capacity, attention)
        self.cache = open_cache(form, capacity, self.backend)
        self.block: int | None = None  # of the next steps, see kv.Cache.place

    def step(
        self,
        tokens: Sequence[int] | np.ndarray,
        parents: Sequence[int] | np.ndarray,
        outputs: Sequence[str] = ("logits",),
        rows: Sequence[int] | np.ndarray | None = None,
        **more: np.ndarray,
    ) -> dict[str, np.ndarray]:
        """Runs the tree and returns copies of the outputs; `rows`: logit_rows, all by default."""
        feeds = self.cache.place(np.asarray(parents, np.int64), block=self.block)
        feeds["input_ids"] = np.asarray(tokens, np.int64)[None]
        feeds["logit_rows"] = np.asarray(range(len(tokens)) if rows is None else rows, np.int64)
        results = self.backend.run(feeds | more, outputs)
        return {name: array.copy() for name, array in results.items()}

    def kv(self, name: str) -> np.ndarray:
        """Returns a copy of one KV buffer, [1, G, S, Dh]."""
        return np.array(self.backend.buffers[name].numpy())
