"""Defines `spec-export build`, which makes a bundle of a target and its drafters."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from spec_export.cli.options import Base, Model, Precision, require_model
from spec_runtime.bundle.manifest import MAX_LANES
from spec_runtime.cli import next_command

DRAFTERS, MACHINE, GRAPHS = "Drafters", "Where the bundle will run", "How graphs are made"

Drafters = Annotated[
    list[str] | None,
    typer.Option(
        "--drafter",
        help="Name of a drafter to include; repeatable",
        show_default="the demo's best; for other targets only prompt_lookup",
        rich_help_panel=DRAFTERS,
    ),
]
DrafterCheckpoints = Annotated[
    list[Path] | None,
    typer.Option(
        "--drafter-checkpoint",
        help="Folder of a training run or drafter, also another library's; repeatable",
        rich_help_panel=DRAFTERS,
    ),
]
DraftModel = Annotated[
    str | None,
    typer.Option(
        "--draft-model",
        help="Small causal LM with the target's vocabulary, given as --model is",
        callback=require_model,
        rich_help_panel=DRAFTERS,
    ),
]
TargetPrecision = Annotated[
    Precision | None,
    typer.Option(
        "--precision",
        help="Precision of the weights: int8 and int4 run on CPUs only, fp16 and bf16 are for "
        "GPUs, and fp8 runs on GPUs only",
        show_default="fp32, with --device cuda fp16",
    ),
]
DrafterPrecision = Annotated[
    Precision | None,
    typer.Option(
        "--drafter-precision",
        help="Precision of the drafters' weights on a CPU: fp32, int8 or int4; changes no token",
        show_default="int8 beside an fp32 target, else the target's",
        rich_help_panel=DRAFTERS,
    ),
]
Int4Block = Annotated[
    int,
    typer.Option(
        "--int4-block",
        help="Weights that share a scale at int4, 32, 64 or 128, where they are not in 4 bits "
        "already: larger blocks are quicker and coarser",
    ),
]
MaxLength = Annotated[
    int | None,
    typer.Option(
        "--max-length",
        min=16,
        help="Longest context in tokens, prompt and answer together",
        show_default="2048, or the target's own if less",
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out",
        help="Folder of the bundle; a bundle there is replaced",
        show_default="bundles/ and the target's name",
    ),
]
TargetDevice = Annotated[
    Literal["cpu", "cuda"],
    typer.Option(
        "--device",
        help="What ONNX Runtime will run on; cuda takes fp16, bf16 and fp32",
        rich_help_panel=MACHINE,
    ),
]
BuildBackend = Annotated[
    Literal["onnxruntime", "tensorrt"],
    typer.Option(
        "--backend",
        help="tensorrt adds TensorRT plans, in fp16, bf16 or fp32: built, never executed",
        rich_help_panel=MACHINE,
    ),
]
ComputeCapabilities = Annotated[
    list[str] | None,
    typer.Option(
        "--compute-capability",
        metavar="X.Y",
        help="Compute capability of a GPU to build TensorRT plans for, such as 8.9; repeatable",
        show_default="that of the GPU here",
        rich_help_panel=MACHINE,
    ),
]
GraphForm = Annotated[
    Literal["slots", "contiguous"],
    typer.Option(
        "--form",
        help="Form of the KV cache: slots for ONNX Runtime, contiguous for TensorRT",
        rich_help_panel=GRAPHS,
    ),
]
Lanes = Annotated[
    int,
    typer.Option(
        "--lanes",
        min=1,
        max=MAX_LANES,
        help="Conversations that one pass takes together; 1 leaves these graphs out",
        rich_help_panel=GRAPHS,
    ),
]


def command(
    model: Model = None,
    base: Base = None,
    precision: TargetPrecision = None,
    max_length: MaxLength = None,
    out: Out = None,
    drafter: Drafters = None,
    drafter_checkpoint: DrafterCheckpoints = None,
    draft_model: DraftModel = None,
    drafter_precision: DrafterPrecision = None,
    device: TargetDevice = "cpu",
    backend: BuildBackend = "onnxruntime",
    compute_capability: ComputeCapabilities = None,
    form: GraphForm = "slots",
    lanes: Lanes = MAX_LANES,
    int4_block: Int4Block = 32,
) -> None:
    """Build a bundle: the target's and its drafters' graphs, the tokenizer and a manifest.

    Without options it builds the demo's bundle with its best drafter.
    """
    from spec_export.build.options import BuildOptions

    options = BuildOptions(
        model=model,
        base=base,
        drafters=drafter or (),
        drafter_checkpoints=drafter_checkpoint or (),
        precision=None if precision is None else precision.value,
        drafter_precision=None if drafter_precision is None else drafter_precision.value,
        max_length=max_length,
        out=out,
        form=form,
        draft_model=draft_model,
        backend=backend,
        compute_capabilities=compute_capability or (),
        device=device,
        lanes=lanes,
        int4_block=int4_block,
    )
    options.require_files()  # before torch is imported

    from spec_export.build.make_bundle import build
    from spec_export.cli.report import TerminalReport
    from spec_runtime.bundle import manifest as bundles

    folder = build(options, TerminalReport())
    print(folder)
    has_drafters = bool(bundles.read(folder, verify=False).manifest.drafters)
    next_command.say("build" if has_drafters else "calibrate", folder)
