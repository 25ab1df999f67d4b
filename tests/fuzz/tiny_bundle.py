"""Writes a whole bundle of a few kilobytes that ONNX Runtime really runs: a target, two drafters.

The target's numbers are small whole numbers, so that sums are exact in any order: a token's logits
are bit-equal whether it is computed singly, in a chunk or in a tree. The target mostly goes round
among four letters, which its drafters know, and otherwise depends on all that a row attends.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from small import CALIBRATION, byte_tokenizer, small_manifest, write_byte_tokenizer

from spec_runtime.bundle import manifest as bundles
from spec_runtime.bundle.manifest import Graph, TensorSpec

VOCAB, WIDTH, CANDIDATES, MASKS = 258, 4, 3, 2
MAX_LENGTH, SCRATCH = 96, 32
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
KV_SHAPE = (1, 1, "S", WIDTH)
WHOLE = "full_buffer"  # the graphs' masks are as wide as their caches
ROW_INPUTS = (
    TensorSpec("input_ids", "int64", (1, "N")),
    TensorSpec("position_ids", "int64", (1, "N")),
    TensorSpec("mask", "bool", (1, 1, "N", "S")),
    TensorSpec("logit_rows", "int64", ("M",)),
    TensorSpec("slots", "int64", ("N",)),
    TensorSpec("seqlens_k", "int32", (1,)),
    TensorSpec("kv.0.k", "float32", KV_SHAPE),
)
KV_OUTPUT = TensorSpec("kv.0.k.out", "float32", KV_SHAPE)
FEATURES = WIDTH + 1  # the last one is the token
TARGET = Graph(
    "target/target.onnx",
    "slots",
    ROW_INPUTS,
    (
        TensorSpec("logits", "float32", ("M", VOCAB)),
        TensorSpec("features", "float32", ("N", FEATURES)),
        KV_OUTPUT,
    ),
    attention=WHOLE,
)
PARALLELSPEC = Graph(
    "drafters/parallelspec/drafter.onnx",
    "slots",
    (*ROW_INPUTS, TensorSpec("features", "float32", (1, "N", FEATURES))),
    (
        TensorSpec("guess_ids", "int64", ("M", CANDIDATES)),
        TensorSpec("guess_log_probs", "float32", ("M", CANDIDATES)),
        KV_OUTPUT,
    ),
    attention=WHOLE,
)
MEDUSA = Graph(
    "drafters/medusa/drafter.onnx",
    "stateless",
    (TensorSpec("features", "float32", (1, FEATURES)),),
    (
        TensorSpec("guess_ids", "int64", (2, CANDIDATES)),
        TensorSpec("guess_log_probs", "float32", (2, CANDIDATES)),
    ),
)


class _Nodes:
    """Collects nodes and constants of a graph; each call returns the name of its one output."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.constants: list[Any] = []

    def constant(self, value: Any, dtype: type = np.int64) -> str:
        name = f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.array(value, dtype), name))
        return name

    def __call__(self, op: str, *inputs: str, out: str = "", **attributes: Any) -> str:
        name = out or f"n{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, list(inputs), [name], **attributes))
        return name

    def following(self, token: str) -> str:
        """Returns the letter that mostly follows: (token + 1) % 4 + 97."""
        added = self("Mod", self("Add", token, self.constant(1)), self.constant(4))
        return self("Add", added, self.constant(97))

    def save(self, graph: Graph, folder: Path) -> None:
        types = {"float32": TensorProto.FLOAT, "int64": TensorProto.INT64}
        types |= {"int32": TensorProto.INT32, "bool": TensorProto.BOOL}
        inputs, outputs = (
            [helper.make_tensor_value_info(s.name, types[s.dtype], list(s.shape)) for s in specs]
            for specs in (graph.inputs, graph.outputs)
        )
        made = helper.make_graph(self.nodes, "tiny", inputs, outputs, self.constants)
        model = helper.make_model(made, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
        path = folder / graph.file
        path.parent.mkdir(parents=True, exist_ok=True)
        onnx.save(model, path)


def _attend(n: _Nodes) -> tuple[str, str]:
    """Adds the cache: writes rows, sums what each row attends. Returns token [N], state [N, D]."""
    front = n.constant([0])
    token_N = n("Squeeze", "input_ids", front)
    table = np.random.default_rng(0).integers(1, 6, (VOCAB + MASKS, WIDTH))
    embedded = n("Gather", n.constant(table, np.float32), token_N)
    position = n("Cast", n("Squeeze", "position_ids", front), to=TensorProto.FLOAT)
    weight = n("Mod", position, n.constant(7, np.float32), fmod=1)
    weight = n("Add", weight, n.constant(1, np.float32))
    row_ND = n("Mul", embedded, n("Unsqueeze", weight, n.constant([1])))
    flat = n("Squeeze", "kv.0.k", n.constant([0, 1]))
    index = n("Unsqueeze", "slots", n.constant([1]))
    written = n("ScatterND", flat, index, row_ND)
    n("Unsqueeze", written, n.constant([0, 1]), out="kv.0.k.out")
    mask_NS = n("Cast", n("Squeeze", "mask", n.constant([0, 1])), to=TensorProto.FLOAT)
    state = n("Add", n("MatMul", mask_NS, written), embedded)
    return token_N, n("Mod", state, n.constant(11, np.float32), fmod=1)


def _save_target(folder: Path) -> None:
    n = _Nodes()
    token_N, state_ND = _attend(n)
    token_N1 = n("Unsqueeze", n("Cast", token_N, to=TensorProto.FLOAT), n.constant([1]))
    n("Concat", state_ND, token_N1, out="features", axis=1)
    weight = np.random.default_rng(1).integers(0, 9, (WIDTH, VOCAB))
    row_MD = n("Gather", state_ND, "logit_rows")
    noise = n("MatMul", row_MD, n.constant(weight, np.float32))
    noise = n("Mod", n("Mul", noise, n.constant(7, np.float32)), n.constant(31, np.float32), fmod=1)
    noise = n("Div", noise, n.constant(4, np.float32))
    likely_M = n.following(n("Gather", token_N, "logit_rows"))
    is_likely = n("Equal", n("Unsqueeze", likely_M, n.constant([1])), n.constant([range(VOCAB)]))
    likely = n("Where", is_likely, n.constant(9, np.float32), n.constant(0, np.float32))
    n("Add", noise, likely, out="logits")
    n.save(TARGET, folder)


def _guess(n: _Nodes, first_M: str) -> None:
    """Adds the outputs of a drafter: three letters from `first_M` on, with falling probability."""
    first = n("Unsqueeze", first_M, n.constant([1]))
    ids = n("Mod", n("Add", first, n.constant([[0, 1, 2]])), n.constant(VOCAB))
    n("Identity", ids, out="guess_ids")
    shape = n("Shape", ids)
    log_probs = np.log([[0.6, 0.3, 0.1]])
    n("Expand", n.constant(log_probs, np.float32), shape, out="guess_log_probs")


def _save_parallelspec(folder: Path) -> None:
    n = _Nodes()
    token_N, _ = _attend(n)
    _guess(n, n.following(n("Gather", token_N, "logit_rows")))
    n.save(PARALLELSPEC, folder)


def _save_medusa(folder: Path) -> None:
    n = _Nodes()
    last = n("Slice", "features", n.constant([WIDTH]), n.constant([FEATURES]), n.constant([1]))
    token_1 = n("Squeeze", n("Cast", last, to=TensorProto.INT64), n.constant([1]))
    guesses = [n.following(n.following(token_1))]
    guesses.append(n.following(guesses[0]))
    _guess(n, n("Concat", *guesses, axis=0))
    n.save(MEDUSA, folder)


def _manifest() -> bundles.Manifest:
    small = small_manifest()
    configs = {
        "parallelspec": {"num_masks": MASKS, "mask_token_base": VOCAB, "inputs": "features+tokens"},
        "medusa": {},
    }
    graphs = {"parallelspec": PARALLELSPEC, "medusa": MEDUSA}
    drafters = tuple(
        replace(
            small.drafters[0],
            name=name,
            config=configs[name] | {"parameters": 9},
            graphs={"drafter": graphs[name]},
            calibration=CALIBRATION,
            trees={"max_nodes": 6, "min_probability": 0.04, "lookup_nodes": 0},
            expected_accepted_length=1.2,
        )
        for name in graphs
    )
    dims = bundles.Dims(VOCAB, WIDTH, 1, 1, 1, WIDTH)
    target = replace(small.target, dims=dims, max_length=MAX_LENGTH, scratch=SCRATCH, taps=())
    return replace(
        small,
        name="tiny",
        target=target,
        graphs={"target": TARGET},
        drafters=drafters,
        tokenizer=byte_tokenizer(VOCAB),
        provenance={"command": ["spec-export", "build"], "date": "2026-01-01"},
    )


def write(folder: Path) -> Path:
    """Writes the bundle into `folder` and returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    _save_target(folder)
    _save_parallelspec(folder)
    _save_medusa(folder)
    write_byte_tokenizer(folder / "tokenizer.json")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    bundles.write_manifest(folder, _manifest())
    return folder


class Copy:
    """A copy of the tiny bundle that cases change and `restore` makes whole again."""

    def __init__(self, root: Path) -> None:
        self.whole = write(root / "whole")
        self.folder = root / "bundle"
        self.manifest: dict[str, Any] = json.loads((self.whole / "manifest.json").read_text())
        self.files = sorted(p.relative_to(self.whole) for p in self.whole.rglob("*.*"))
        self.restore()

    def restore(self) -> None:
        """Makes `folder` a fresh copy."""
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.copytree(self.whole, self.folder)
