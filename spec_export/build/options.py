"""Holds everything a build can be asked for, and refuses combinations that cannot work."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spec_export import drafters as drafter_files
from spec_export.graphs.four_bits import BLOCKS
from spec_export.training import folders
from spec_runtime.bundle import manifest as bundles
from spec_runtime.errors import UserError
from spec_runtime.files.writing import require_replaceable
from spec_runtime.proposers import BUILT_IN

BUILD_BACKENDS = ("onnxruntime", "tensorrt")
DEVICES = ("cpu", "cuda")
FORMS = ("slots", "contiguous")
CPU_PRECISIONS, GPU_PRECISIONS = ("int8", "int4"), ("fp8",)  # which run nowhere else
PRECISIONS = ("fp32", *CPU_PRECISIONS, "fp16", "bf16", *GPU_PRECISIONS)
DRAFTER_PRECISIONS = ("fp32", *CPU_PRECISIONS)

# The tree a drafter gets on a CPU, by the target's precision: its nodes (root included), the
# smallest path probability of a drafted node, and how many nodes prompt lookup may add. Where a
# node costs more of a step, it must be likelier. On a GPU it costs next to nothing.
TREES = {
    "fp32": {"max_nodes": 16, "min_probability": 0.08, "lookup_nodes": 8},
    "int8": {"max_nodes": 16, "min_probability": 0.08, "lookup_nodes": 8},
    "int4": {"max_nodes": 16, "min_probability": 0.15, "lookup_nodes": 8},
}
DEFAULT_TREE = {"max_nodes": 16, "min_probability": 0.03, "lookup_nodes": 8}
# CUDA's products of 8-bit floats read each weight once for up to 8 rows, and unpack them for more.
FP8_TREE = DEFAULT_TREE | {"max_nodes": 8, "lookup_nodes": 4}


@dataclass(frozen=True)
class BuildOptions:
    """Describes one build; every refusal that needs no file is made here.

    model: a folder, hub id or GGUF file; None means the demo. base: of the adapter that `model`
    names, None for the one that it names itself.
    drafters: names of drafters. Without any, the bundle gets the best drafter shipped for the demo,
    or only prompt lookup for another target.
    drafter_checkpoints: folders that `spec-export train` wrote, of runs or of their drafters, or
    of other libraries' drafters, which are imported first.
    precision: of the target's weights; None means fp16 for CUDA and fp32 otherwise.
    max_length: the context in tokens; None means 2048, or the target's own context if that is less.
    out: the bundle's folder; None means bundles/ and the target's name.
    form: "slots" for ONNX Runtime or "contiguous" for TensorRT, which takes it whatever is given,
    see `graph_form`; CUDA takes only the slots form.
    draft_model: a causal LM with the target's vocabulary, given as `model` is.
    backend: "tensorrt" adds plans, and the target's graph finds the argmax itself. A plan of the
    bundle being replaced is taken over if nothing it depends on has changed.
    compute_capabilities: of the GPUs to build plans for, such as "8.9"; none means the GPU here.
    device: "cuda" is for ONNX Runtime's CUDA provider. Drafters then have the target's type, and
    the graph itself finds the argmax and the largest logits.
    drafter_precision: of the drafters' weights on a CPU, fp32, int8 or int4, see `precision_of`.
    lanes: how many conversations one pass of the target takes, up to 8, see graphs/lanes.py; 1
    leaves those graphs out, and TensorRT has none.
    int4_block: how many int4 weights share a scale, 32, 64 or 128, where they are not in 4 bits
    already, see graphs/four_bits.py.

    Raises UserError for an unknown name or a combination that cannot be built.
    """

    model: str | None = None
    drafters: Sequence[str] = ()
    drafter_checkpoints: Sequence[Path] = ()
    precision: str | None = None
    max_length: int | None = None
    out: Path | None = None
    form: str = "slots"
    draft_model: str | None = None
    backend: str = "onnxruntime"
    compute_capabilities: Sequence[str] = ()
    device: str = "cpu"
    drafter_precision: str | None = None
    base: str | None = None
    lanes: int = bundles.MAX_LANES
    int4_block: int = BLOCKS[-1]

    def __post_init__(self) -> None:
        _require_one_of("precision", self.target_precision, PRECISIONS)
        _require_one_of("backend", self.backend, BUILD_BACKENDS)
        if self.compute_capabilities and self.backend != "tensorrt":
            raise UserError(
                "got a compute capability with onnxruntime, expected --backend tensorrt"
            )
        _require_one_of("device", self.device, DEVICES)
        _require_one_of("form", self.form, FORMS)
        self._require_device_fits()
        self._require_precision_fits()
        self._require_drafter_precision_fits()
        if not 1 <= self.lanes <= bundles.MAX_LANES:
            raise UserError(f"got {self.lanes} lanes, expected 1 to {bundles.MAX_LANES}")
        if self.int4_block not in BLOCKS:
            raise UserError(f"got int4 blocks of {self.int4_block}, expected 32, 64 or 128 weights")
        for name in self.drafters:
            _require_one_of("drafter", name, [*drafter_files.trainable(), *BUILT_IN])
        alone = self.trained_drafters in ([], ["draft_model"]) and not self.drafter_checkpoints
        if self.draft_model is not None and not alone:
            raise UserError(
                "got --draft-model with another drafter or a checkpoint, expected it alone"
            )

    @property
    def lane_numbers(self) -> range:
        """For how many lanes each there is a graph of the target."""
        return range(2, self.lanes + 1 if self.graph_form == "slots" else 2)

    def _require_device_fits(self) -> None:
        if self.device == "cuda" and self.target_precision in CPU_PRECISIONS:
            raise UserError(
                f"got precision {self.target_precision} with device cuda, expected fp16, bf16 or "
                "fp32, or fp8: int8 and int4 are for CPUs"
            )
        if self.device != "cuda" and self.target_precision in GPU_PRECISIONS:
            raise UserError(
                f"got precision {self.target_precision} with device {self.device}, expected device "
                "cuda: no other has products of 8-bit floats; int8 and int4 are for CPUs"
            )
        if self.device == "cuda" and self.backend != "onnxruntime":
            raise UserError(
                f"got device cuda with backend {self.backend}, expected onnxruntime: "
                f"{self.backend} is for GPUs anyway"
            )
        if self.device == "cuda" and self.form != "slots":
            raise UserError(
                f"got form {self.form} with device cuda, expected slots: leave out --form or build "
                "for TensorRT (--backend tensorrt)"
            )

    def _require_precision_fits(self) -> None:
        if self.graph_form == "contiguous" and self.target_precision in CPU_PRECISIONS:
            raise UserError(
                f"got precision {self.target_precision} with the contiguous form, expected fp32, "
                "fp16 or bf16: TensorRT reads those"
            )

    def _require_drafter_precision_fits(self) -> None:
        if self.drafter_precision is None:
            return
        _require_one_of("drafter_precision", self.drafter_precision, DRAFTER_PRECISIONS)
        if not self.takes_quantised:
            raise UserError(
                f"got drafter precision {self.drafter_precision} with device {self.device} and the "
                f"{self.graph_form} form, expected a CPU and slots: elsewhere drafters have the "
                "target's precision"
            )

    def require_files(self) -> None:
        """Raises UserError unless drafters lie where they are said to, and the bundle may be
        written."""
        if self.out is not None:
            require_replaceable(self.out, bundles.own_files, "a bundle")
        for folder in self.drafter_checkpoints:
            folders.require_drafter(folder)

    @property
    def target_precision(self) -> str:
        """The precision of the target's weights, with the default filled in."""
        return self.precision or ("fp16" if self.device == "cuda" else "fp32")

    def precision_of(self, drafter: Any) -> str:
        """Returns the precision of a drafter's weights; `drafter` is its module.

        Beside an fp32 target on a CPU they are int8 if nothing else is asked for: a draft then
        takes two thirds of the time, and no token can change, since the target decides. A drafter
        that runs on the target's own layers has the target's precision.
        """
        if drafter.shares_target_cache:
            return self.target_precision
        if self.drafter_precision is not None:
            return self.drafter_precision
        is_beside_fp32 = self.target_precision == "fp32" and self.takes_quantised
        return "int8" if is_beside_fp32 and not drafter.is_whole_model else self.target_precision

    @property
    def takes_quantised(self) -> bool:
        """True where graphs may be in int8 or int4: on a CPU, in the slots form."""
        return self.device == "cpu" and self.graph_form == "slots"

    @property
    def graph_form(self) -> str:
        """The form of the graphs that have a cache: "slots", or "contiguous" for TensorRT."""
        return "contiguous" if self.backend == "tensorrt" else self.form

    @property
    def attention(self) -> str:
        """How graphs in the slots form read their caches, see graphs/slots.py.

        CUDA's GroupQueryAttention has kernels only for half precision, and none for sinks beside a
        mask, for which `GraphWriter` changes it.
        """
        if self.device != "cuda":
            return "bias"
        return "full_buffer" if self.target_precision == "fp32" else "append"

    @property
    def has_banks(self) -> bool:
        """True where features and states stay on the device, see graphs/banks.py."""
        return self.device == "cuda"

    @property
    def trained_drafters(self) -> list[str]:
        """The drafters asked for that need trained weights."""
        return [name for name in self.drafters if name not in BUILT_IN]

    @property
    def is_for_gpu(self) -> bool:
        """True where the bundle will run on a GPU."""
        return self.device == "cuda" or self.backend == "tensorrt"

    @property
    def tree(self) -> dict[str, float]:
        """The tree that the manifest names for each drafter."""
        if self.is_for_gpu:
            return FP8_TREE if self.target_precision == "fp8" else DEFAULT_TREE
        return TREES.get(self.target_precision, DEFAULT_TREE)


def _require_one_of(what: str, got: str, known: Sequence[str]) -> None:
    """Raises UserError, which lists the known names, if `got` is none of them."""
    if got not in known:
        raise UserError(f"got {what} {got!r}, expected one of {', '.join(known)}", param=what)
