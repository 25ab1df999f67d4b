"""spec-export build: from a target and a drafter's checkpoint to a bundle."""

from pathlib import Path
from typing import Annotated

import typer

from spec_export.cli.options import Attention, Backend, Device, Form, Model, Precision


def command(
    model: Model = None,
    drafter: Annotated[
        list[str] | None, typer.Option("--drafter", help="Drafter to put in; may be repeated")
    ] = None,
    drafter_checkpoint: Annotated[
        list[Path] | None,
        typer.Option("--drafter-checkpoint", help="What spec-export train wrote; may be repeated"),
    ] = None,
    draft_model: Annotated[
        str | None,
        typer.Option("--draft-model", help="A small causal LM with the target's vocabulary"),
    ] = None,
    precision: Annotated[
        Precision | None,
        typer.Option(
            "--precision",
            help="int8 and int4 are for CPU, fp16 for CUDA",
            show_default="fp32, on CUDA fp16",
        ),
    ] = None,
    max_length: Annotated[
        int | None,
        typer.Option("--max-length", min=16, help="Context in tokens", show_default="the target's"),
    ] = None,
    form: Annotated[
        Form, typer.Option("--form", help="slots for ONNX Runtime, contiguous for TensorRT")
    ] = Form.slots,
    reduce_range: Annotated[
        bool, typer.Option("--reduce-range", help="int8 for CPUs with AVX2 but no VNNI")
    ] = False,
    device: Annotated[
        Device,
        typer.Option("--device", help="What ONNX Runtime will run it on: cuda takes no int8, int4"),
    ] = Device.cpu,
    backend: Annotated[
        Backend,
        typer.Option("--backend", help="tensorrt adds plans (fp16, bf16 or fp32, contiguous form)"),
    ] = Backend.onnxruntime,
    compute_capability: Annotated[
        list[str] | None,
        typer.Option(
            "--compute-capability",
            metavar="X.Y",
            help="Of the GPUs to build plans for, as 8.9; may be repeated",
            show_default="the GPU's here",
        ),
    ] = None,
    fuse: Annotated[
        bool,
        typer.Option("--fuse", help="Add draft, verify and accept as one graph, for CUDA"),
    ] = False,
    attention: Annotated[
        Attention,
        typer.Option(
            "--attention",
            help="How the target reads its cache, to compare on CUDA; chain takes no trees",
        ),
    ] = Attention.bias,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Folder", show_default="bundles/ and the target's name"),
    ] = None,
) -> None:
    """Build a bundle: graphs, tokenizer and manifest. Without arguments: the demo's."""
    from spec_export import make_bundle

    path = make_bundle.build(
        model=model,
        drafters=drafter or [],
        drafter_checkpoints=drafter_checkpoint or [],
        precision=None if precision is None else precision.value,
        max_length=max_length,
        out=out,
        form=form.value,
        reduce_range=reduce_range,
        draft_model=draft_model,
        backend=backend.value,
        device=device.value,
        compute_capabilities=compute_capability or [],
        fuse=fuse,
        attention=attention.value,
    )
    print(path)
