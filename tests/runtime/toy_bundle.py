"""Writes bundles that open as the toy target and its toy drafter."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from small import byte_tokenizer, small_manifest, write_byte_tokenizer
from toy_backend import CHATML, ToyDrafter, ToyTarget

from spec_runtime import backends
from spec_runtime.bundle import manifest as bundle

tokenizers = pytest.importorskip("tokenizers")

MAX_LENGTH, SCRATCH = 80, 16


def write_bundle(folder: Path, drafters: tuple[str, ...] = (), **changes: Any) -> Path:
    """Writes a bundle whose graph files are empty, for tests that patch the backends in."""
    (folder / "graph.onnx").write_bytes(b"")
    (folder / "chat_template.jinja").write_text(CHATML)
    vocab_size = write_byte_tokenizer(folder / "tokenizer.json")
    graph = bundle.Graph("graph.onnx", "slots", (), ())
    states = [bundle.TensorSpec(name, "float32", ("N", 4)) for name in ("features", "taps.1")]
    config = {"num_masks": 3, "mask_token_base": vocab_size, "inputs": "features+tokens"}
    small = small_manifest()
    entry = replace(
        small.drafters[0],
        config=changes.get("config", config),
        graphs={"drafter": graph},
        trees=changes.get("trees", {"max_nodes": 6, "min_probability": 0.04}),
        expected_accepted_length=changes.get("expected"),
    )
    dims = bundle.Dims(changes.get("num_logits", vocab_size), 8, 1, 1, 1, 8)
    manifest = replace(
        small,
        name="toy",
        target=replace(small.target, dims=dims, max_length=MAX_LENGTH, scratch=SCRATCH),
        graphs={"target": replace(graph, outputs=tuple(states))},
        drafters=tuple(replace(entry, name=name) for name in drafters),
        tokenizer=byte_tokenizer(changes.get("vocab_size", vocab_size)),
    )
    bundle.write_manifest(folder, manifest)
    return folder


def patch_graphs(monkeypatch: pytest.MonkeyPatch) -> list[ToyTarget]:
    """Makes every first graph that is opened a toy target, and the next ones its drafters.

    Returns the targets, a list that grows as graphs are opened.
    """
    opened: list[ToyTarget] = []

    def open_graph(
        opened_bundle: bundle.Bundle, graph: bundle.Graph, capacity: int, runtime: backends.Runtime
    ) -> backends.Backend:
        assert capacity == MAX_LENGTH + SCRATCH
        if opened:
            return ToyDrafter(opened[0], capacity=capacity, num_taps=1)
        vocab_size = opened_bundle.manifest.target.dims.vocab_size
        opened.append(ToyTarget(vocab_size=vocab_size, capacity=capacity, peak=9.0))
        return opened[0]

    monkeypatch.setattr(backends, "open_graph", open_graph)
    return opened
