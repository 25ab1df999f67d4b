"""Tests bundles whose attention reads whole buffers, which float32 on CUDA takes: real graphs of a
tiny target, with every drafter, give the tokens of plain decoding with a bias."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("onnxruntime")

from cuda_standin import StandIn  # noqa: E402
from cuda_standin.calls import Calls, read_calls  # noqa: E402
from test_cuda_matrix import UNWANTED  # noqa: E402
from workshop import UntrainedWorkshop, Workshop  # noqa: E402

import spec_runtime  # noqa: E402
from spec_export import drafters  # noqa: E402
from spec_export.build.make_bundle import BuildOptions  # noqa: E402
from spec_export.check import check  # noqa: E402
from spec_runtime.bundle import manifest as bundles  # noqa: E402
from spec_runtime.trees.tree import chain_parents  # noqa: E402

DRAFTERS = drafters.trainable()
PROMPTS = ("say abc, 3", "The quick brown fox; 0123 0123")
OPTIONS: Any = {"max_new_tokens": 24, "ignore_eos": True}
ASKED: list[tuple[str, Any]] = [
    (prompt, OPTIONS | sampling)
    for prompt in PROMPTS
    for sampling in ({}, {"temperature": 0.8, "seed": 5})
]


@pytest.fixture(scope="module")
def folder(workshop: Workshop) -> Path:
    """Returns an fp32 bundle for CUDA with every drafter."""
    return workshop.lanes("fp32")


@pytest.fixture(scope="module")
def plain(workshop: Workshop, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """Returns the tokens of plain decoding with a bias, for each of ASKED."""
    bundle = workshop.build(tmp_path_factory.mktemp("plain") / "bundle")
    engine = spec_runtime.load(bundle, "none", threads=1)
    return [engine.generate(prompt, **options).token_ids for prompt, options in ASKED]


@pytest.mark.parametrize("name", [*DRAFTERS, "prompt_lookup", "lookahead", "none"])
def test_every_drafter_gives_the_tokens_of_plain_decoding_with_a_bias(
    folder: Path, plain: list[list[int]], name: str
) -> None:
    lookup = False if name in DRAFTERS else None
    engine = spec_runtime.load(folder, name, threads=1, lookup=lookup)
    has_branches = False
    for (prompt, options), expected in zip(ASKED, plain, strict=True):
        tokens = []
        for step in engine.steps(prompt, **options):
            tokens += step.tokens
            if step.verified is not None:
                parent_N = step.verified.tree.parent_N
                has_branches |= bool((parent_N != chain_parents(len(parent_N))).any())
        assert tokens == expected, (prompt, options)
    assert has_branches == (name != "none")


def test_attention_follows_from_device_and_precision(workshop: Workshop, folder: Path) -> None:
    assert bundles.ATTENTIONS == ("bias", "full_buffer", "append")
    for options, expected in (
        ({}, "bias"),
        ({"precision": "int8"}, "bias"),
        ({"device": "cuda"}, "append"),
        ({"device": "cuda", "precision": "bf16"}, "append"),
        ({"device": "cuda", "precision": "fp32"}, "full_buffer"),
        ({"backend": "tensorrt"}, "bias"),
    ):
        assert BuildOptions(**options).attention == expected  # type: ignore[arg-type]
    for path, expected in ((folder, "full_buffer"), (workshop.bundle("parallelspec"), "bias")):
        manifest = bundles.read(path).manifest
        graphs = [manifest.graphs["target"]]
        graphs += [graph for drafter in manifest.drafters for graph in drafter.graphs.values()]
        for graph in graphs:
            form, attention = (
                ("slots", expected) if graph.form == "slots" else ("stateless", "bias")
            )
            assert (graph.form, graph.attention) == (form, attention), graph.file


def test_check_passes(workshop: Workshop, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "REFERENCE_TOKENS", 2)  # accepted length has no bound
    monkeypatch.setattr(check.reference, "prompts", lambda: ("say abc",))
    rows = check.run(str(workshop.llama()), folder, []).rows
    assert all(row.passed for row in rows)
    # what is compared with drafters' own weights is asked for with their checkpoints
    assert all(row.name.startswith("fused.") for row in rows if row.skipped)
    names = {row.name for row in rows}
    assert {"random trees", "permuted slots", "perplexity ratio"} <= names
    assert f"accepted, {DRAFTERS[0]}" in names


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (
            {"attention": "chain"},
            "attention: got str 'chain', expected one of bias, full_buffer, append",
        ),
        ({"attention": "full_buffer", "form": "contiguous"}, "with the contiguous form, expected"),
        ({"attention": 3}, "attention: got int 3, expected str"),
    ],
)
def test_a_manifest_that_cannot_be_is_refused_in_one_line(
    workshop: Workshop, tmp_path: Path, changes: dict[str, Any], why: str
) -> None:
    """Among them bundles of versions that had the attention "chain"."""
    copy = Path(shutil.copytree(workshop.bundle("parallelspec"), tmp_path / "bundle"))
    file = copy / bundles.MANIFEST
    data = json.loads(file.read_text())
    assert "attention" not in data["graphs"]["target"], "the default is not written"
    data["graphs"]["target"] |= changes
    file.write_text(json.dumps(data))
    with pytest.raises(bundles.BundleError, match=why) as caught:
        spec_runtime.load(copy)
    assert "\n" not in str(caught.value)


# ---- over the stand-in for CUDA ----

# Runs the target eagerly, in a capture and in a replay, with each number of rows.
RUN_TARGET = """
import ctypes, sys
import numpy as np
from spec_runtime import backends
from spec_runtime.bundle import manifest as bundle
from spec_runtime.loop.kv import open_cache
from spec_runtime.trees.tree import chain_parents

mark = ctypes.CDLL("libcudart.so.13").standin_mark
opened = bundle.read(sys.argv[1])
info, graph = opened.manifest.target, opened.manifest.graphs["target"]
capacity = info.max_length + info.scratch
backend = backends.open_graph(opened, graph, capacity, backends.Runtime("cuda", threads=1))
cache = open_cache(graph.form, capacity, backend)
for n in map(int, sys.argv[2:]):
    feeds = cache.place(chain_parents(n))
    feeds |= {"input_ids": np.zeros((1, n), np.int64), "logit_rows": np.arange(n)}
    for kind in ("eager", "capture", "replay"):
        mark(f"{kind} {n}".encode())
        backend.run(feeds, ["argmax_ids"])
    mark(b"rest")
    cache.commit([0])
buffers = [spec for spec in graph.inputs if spec.name.startswith("kv.")]
print(min(backend.buffers[spec.name].numpy().nbytes for spec in buffers))
"""


def calls(
    standin: StandIn, tmp_path: Path, script: str, *arguments: Any
) -> tuple[str, dict[str, Calls]]:
    """Runs a script over the stand-in; returns its output, and the calls by mark, none of which
    is what attention may not do."""
    log = tmp_path / "log"
    done = standin.run("-c", script, *arguments, log=log)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "runs without CUDA graphs" not in done.stderr
    sections = read_calls(log)
    for name, each in sections.items():
        kernels = each.kernels + each.captured_kernels
        assert not [kernel for kernel in kernels if any(part in kernel for part in UNWANTED)], name
        assert each.violations == [], name
        assert "H2D" not in [kind for kind, _ in each.captured_copies], name
    return done.stdout, sections


@pytest.mark.standin
@pytest.mark.parametrize("num_kv_heads", [2, 4])
def test_rows_are_read_in_place_at_every_width(
    standin: StandIn, folder: Path, tmp_path: Path, num_kv_heads: int
) -> None:
    """No kernel copies rows for each query head. With as many key heads as query heads, ONNX
    Runtime would choose the memory-efficient one by itself."""
    if num_kv_heads == 4:
        other = UntrainedWorkshop(tmp_path / "other", {"num_key_value_heads": num_kv_heads})
        folder = other.build(tmp_path / "bundle", precision="fp32", device="cuda")
    dims = bundles.read(folder).manifest.target.dims
    assert (dims.num_heads, dims.num_kv_heads) == (4, num_kv_heads)
    widths = (1, 16, 64)
    printed, sections = calls(standin, tmp_path, RUN_TARGET, folder, *widths)
    for n in widths:
        eager, capture, replay = (
            sections[f"{kind} {n}"] for kind in ("eager", "capture", "replay")
        )
        softmax = sum("UnfusedSoftmax" in kernel for kernel in eager.kernels)
        assert (softmax, eager.num_graph_launches) == (dims.num_layers, 0)
        assert capture.num_graph_launches == replay.num_graph_launches == 1
        assert not replay.kernels
        for each in (eager, capture, replay):
            copied = [size for kind, size in (*each.copies, *each.captured_copies) if kind == "D2D"]
            assert max(copied, default=0) < int(printed), "as large as a buffer"
