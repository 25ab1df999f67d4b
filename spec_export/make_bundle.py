"""Build a bundle: export the target and its drafters, quantise, add tokenizer and manifest, rename
into place.

Knows the order of things and the manifest; the graphs are other files' work.
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from rich.console import Console
from rich.table import Table

from spec_export import drafters as drafter_files
from spec_export import reference, target
from spec_export.decoder import Backbone, DecoderConfig
from spec_export.graphs import quantize, smooth, tensorrt
from spec_export.graphs import trace as onnx_export
from spec_export.graphs.banks import add_argmax, add_top, keep_drafter, keep_target
from spec_export.graphs.fused_step import fuse as fuse_graphs
from spec_export.graphs.slots import to_slots
from spec_export.training import checkpoint, recipe
from spec_runtime import bundle as bundles
from spec_runtime.files import sha256
from spec_runtime.proposers import BUILT_IN

console = Console(stderr=True)
DEFAULT_MAX_LENGTH = 2048
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
BACKENDS = ("onnxruntime", "tensorrt")
DEVICES = ("cpu", "cuda")
# nodes (root included), smallest path probability of a drafted node, and how many nodes prompt
# lookup may add, by target precision: where a node costs more of a step, it must be likelier
TREES = {
    "int8": {"max_nodes": 16, "min_probability": 0.04, "lookup_nodes": 8},
    "int4": {"max_nodes": 16, "min_probability": 0.1, "lookup_nodes": 8},
}
DEFAULT_TREE = {"max_nodes": 16, "min_probability": 0.03, "lookup_nodes": 8}
CHAIN_TREE = {"max_nodes": 16}  # of a target that takes chains only: as deep as the drafter goes


def build(
    model: str | None = None,
    drafters: list[str] | None = None,
    drafter_checkpoints: Sequence[Path] = (),
    precision: str | None = None,
    max_length: int | None = None,
    out: Path | None = None,
    form: str = "slots",
    reduce_range: bool = False,
    draft_model: str | None = None,
    backend: str = "onnxruntime",
    compute_capabilities: Sequence[str] = (),
    device: str = "cpu",
    fuse: bool = False,
    attention: str = bundles.ATTENTIONS[0],
) -> Path:
    """Write a bundle and return its folder (bundles/<target> by default).

    model: folder, hub id, GGUF file, None = the demo. drafters: names; none = the best of those
    shipped for the demo, or prompt lookup alone for another target. drafter_checkpoints: folders
    `spec-export train` wrote. max_length: context in tokens, 2048 or the target's own if less.
    draft_model: a causal LM with the target's vocabulary, given as `model` is. backend: "tensorrt"
    takes the contiguous form and adds plans for these compute capabilities, as "8.9" (none: that of
    the GPU here); plans of a bundle replaced are taken over where nothing they depend on changed.
    device: "cuda" is for ONNX Runtime's CUDA provider: drafters in the target's type, the argmax
    and the largest logits found in the graph, and precision fp16 by default instead of fp32, which
    takes the contiguous form there.
    fuse: add the fused step of every one-pass drafter, see fuse.py. attention: of the graphs
    in the slots form, see onnx_rewrite.to_slots; "chain", of the target's alone, makes every tree a
    chain.
    ValueError: an unknown drafter, no checkpoint for it, or weights that do not fit; nothing is
    left half-written.
    """
    if precision is None:
        precision = "fp16" if device == "cuda" else "fp32"
    if precision not in quantize.PRECISIONS:
        raise ValueError(
            f"got precision {precision!r}, expected one of {', '.join(quantize.PRECISIONS)}"
        )
    if backend not in BACKENDS:
        raise ValueError(f"got backend {backend!r}, expected one of {', '.join(BACKENDS)}")
    if compute_capabilities and backend != "tensorrt":
        raise ValueError("got a compute capability with onnxruntime, expected --backend tensorrt")
    _require_device(device, precision, backend)
    # CUDA's GroupQueryAttention has half-precision kernels alone
    is_wide = device == "cuda" and precision == "fp32"
    if backend == "tensorrt" or is_wide:
        form = "contiguous"
    _require_attention(attention, form, fuse)
    if form == "contiguous" and precision in ("int8", "int4"):
        raise ValueError(
            f"got precision {precision} with the contiguous form, expected fp32, "
            "fp16 or bf16: TensorRT reads those"
        )
    if reduce_range and precision != "int8":
        raise ValueError(
            f"got reduce_range with precision {precision}, expected int8: "
            "no other precision needs it"
        )
    names = _known(drafters or [])
    source = target.resolve(model)
    out = out or Path("bundles") / source.name
    _require_replaceable(out)
    only_built_in = bool(drafters) and not names and not drafter_checkpoints
    if draft_model is not None and (drafter_checkpoints or names not in ([], ["draft_model"])):
        raise ValueError(
            "got --draft-model with another drafter or a checkpoint, expected it alone"
        )
    none_saved = only_built_in or draft_model is not None
    saved = [] if none_saved else _checkpoints(source, names, drafter_checkpoints)
    if fuse:
        _require_fusable(form, [drafter.name for drafter in saved])
    if backend == "tensorrt" or is_wide:
        got = "the tensorrt backend" if backend == "tensorrt" else "fp32 on cuda"
        for drafter in saved:
            if hasattr(drafter_files.load(drafter.name).Drafter, "export_from_target"):
                raise ValueError(
                    f"got drafter {drafter.name} with {got}, expected another one: it shares the "
                    "target's cache, which the contiguous form does not allow"
                )
    plans = None
    if backend == "tensorrt":
        plans = tensorrt.Builder(compute_capabilities, _plans_in(out))
    for drafter in saved:
        _warn_of_doubts(drafter, source)
    with console.status("loading the target"):
        hf_model, tokenizer = target.load(source)
    num_parameters = hf_model.num_parameters()
    taps = tuple(sorted({tap for drafter in saved for tap in drafter.config.get("taps", ())}))
    limit = hf_model.config.max_position_embeddings
    length = min(DEFAULT_MAX_LENGTH, limit) if max_length is None else max_length
    trained = [
        (drafter, _module(drafter, Backbone.from_transformers(hf_model, (), length)))
        for drafter in saved
    ]
    if draft_model is not None:
        vocab_size = hf_model.config.vocab_size
        trained.append(_pretrained(draft_model, tokenizer, vocab_size, length))
    backbone = Backbone.from_transformers(
        hf_model.to(DTYPES.get(precision, torch.float32)), taps, length
    )

    trees = CHAIN_TREE if attention == "chain" else TREES.get(precision, DEFAULT_TREE)
    # drafters' levels are trees
    drafters_attention = bundles.ATTENTIONS[0] if attention == "chain" else attention
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.parent / f".{out.name}.{uuid.uuid4().hex[:8]}.tmp"
    temporary.mkdir()

    def write_step(
        graph: ir.Model,
        file: str,
        lender: str | None = None,
        attention: str = drafters_attention,
        keep: Callable[[ir.Model], ir.Model] | None = None,
    ) -> bundles.Graph:
        has_cache = any(value.name == "position_ids" for value in graph.graph.inputs)
        if device == "cuda":
            tensorrt.narrow(graph, precision)
        if has_cache and form == "slots":
            to_slots(graph, attention)
        if device == "cuda" and form == "slots" and keep is not None:
            keep(graph)
        if plans is not None:
            tensorrt.adapt(graph, precision)
        quantize.quantize(graph, precision, reduce_range)
        written = _write_graph(graph, form if has_cache else "stateless", temporary, file, lender)
        return replace(written, attention=attention) if has_cache else written

    try:
        with console.status("exporting the target"):
            if precision == "int8":
                calibration = [reference.encode(tokenizer, text) for text in reference.prompts()]
                smooth.smooth(backbone, [ids[:length] for ids in calibration])
            traced = onnx_export.export_backbone(backbone, capacity_symbolic=plans is None)
            if device == "cuda":
                add_top(add_argmax(traced))
            file = "target/target.onnx"
            graphs = {"target": write_step(traced, file, attention=attention, keep=keep_target)}
        if precision == "int8" and not reduce_range:
            probe = quantize.saturation_probe()
            graphs["probe"] = _write_graph(probe, "stateless", temporary, "probe/probe.onnx")
        infos = []
        for drafter, module in trained:
            with console.status(f"exporting {drafter.name}"):
                if hasattr(module, "export_from_target"):
                    parts = {
                        role: write_step(
                            exported, f"target/{drafter.name}-{role}.onnx", graphs["target"].file
                        )
                        for role, exported in module.export_from_target(backbone).items()
                    }
                else:
                    keep = partial(
                        keep_drafter,
                        target=traced,
                        config=module.runtime_config(),
                        scratch=backbone.config.scratch,
                    )
                    parts = {
                        role: write_step(
                            exported, f"drafters/{drafter.name}/{role}.onnx", keep=keep
                        )
                        for role, exported in module.export(
                            backbone.config, capacity_symbolic=plans is None
                        ).items()
                    }
                info = _drafter_info(drafter, module, parts, trees, temporary, num_parameters)
                infos.append(info)
                if fuse and getattr(module, "is_one_pass", False):
                    name = bundles.fused_name(info.name)
                    graphs[name] = _write_fused(info, graphs["target"], temporary)
        manifest = bundles.Manifest(
            schema_version=bundles.SCHEMA_VERSION,
            name=source.name,
            target=_target_info(
                backbone.config,
                precision,
                any(drafter.provenance.get("target_modified") for drafter in saved),
            ),
            graphs=graphs,
            drafters=tuple(infos),
            tokenizer=_write_tokenizer(tokenizer, hf_model, temporary),
            provenance=checkpoint.collect_provenance(
                model=source.name,
                source=source.kind,
                drafters={d.name: d.provenance for d, _ in trained},
            ),
            files={},
        )
        if plans is not None:
            manifest = _with_plans(manifest, plans, temporary)
        bundles.write_manifest(temporary, manifest)
        if out.exists():
            shutil.rmtree(out)
        temporary.rename(out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    if not names and not trained:
        console.print(
            f"no drafter is trained for {source.name}: the bundle drafts by prompt lookup. "
            "To train one: spec-export distill, then spec-export train RECIPE"
        )
    return out


def _plans_in(folder: Path) -> dict[str, Path]:
    """The intact plans of the bundle in `folder`, if there is one, by file name."""
    try:
        manifest = bundles.read(folder, verify=False).manifest
    except (bundles.BundleError, OSError):
        return {}
    named = {name: folder / name for name in manifest.files if name.endswith(".plan")}
    return {path.name: path for name, path in named.items() if sha256(path) == manifest.files[name]}


def _with_plans(
    manifest: bundles.Manifest, plans: tensorrt.Builder, root: Path
) -> bundles.Manifest:
    """The manifest with a plan of each graph for each GPU; prints a table of them."""
    tree = TREES.get(manifest.target.precision, DEFAULT_TREE)
    num_nodes = int(tree["max_nodes"] + tree["lookup_nodes"])
    table = Table("graph", "GPU", "plan MB", "build seconds")

    def add(name: str, graph: bundles.Graph) -> bundles.Graph:
        with console.status(f"building the plans of {name}"):
            profiles = tensorrt.profiles_for(graph, num_nodes, manifest.target.scratch)
            graph, built = plans.add_plans(root, name, graph, profiles)
        for each in built:
            size = f"{each.num_bytes / 1e6:.1f}"
            table.add_row(name, each.plan.compute_capability, size, f"{each.seconds:.1f}")
        return graph

    graphs = {name: add(name, graph) for name, graph in manifest.graphs.items()}
    infos = [
        replace(
            info,
            graphs={role: add(f"{info.name}-{role}", graph) for role, graph in info.graphs.items()},
        )
        for info in manifest.drafters
    ]
    console.print(table)
    return replace(manifest, graphs=graphs, drafters=tuple(infos))


def _require_replaceable(out: Path) -> None:
    """Nothing, an empty folder or a bundle, of whatever schema or damage, may be replaced."""
    if out.exists() and not (out / bundles.MANIFEST).is_file() and any(out.iterdir()):
        raise ValueError(f"{out} holds other files, expected a bundle or a new folder")


def _require_device(device: str, precision: str, backend: str) -> None:
    if device not in DEVICES:
        raise ValueError(f"got device {device!r}, expected one of {', '.join(DEVICES)}")
    if device == "cuda" and precision in ("int8", "int4"):
        raise ValueError(
            f"got precision {precision} with device cuda, expected fp16, bf16 or fp32: "
            "int8 and int4 are for CPUs"
        )
    if device == "cuda" and backend != "onnxruntime":
        raise ValueError(
            f"got device cuda with backend {backend}, expected onnxruntime: {backend} is for GPUs "
            "anyway"
        )


def _require_fusable(form: str, names: list[str]) -> None:
    """One drafter at least that guesses in one pass, and the form whose slots the step keeps."""
    if form != "slots":
        raise ValueError(
            f"got fuse with the {form} form, expected slots: leave out --fuse or the form"
        )
    one_pass = [n for n in drafter_files.trainable() if drafter_files.load(n).Drafter.is_one_pass]
    if not set(names) & set(one_pass):
        raise ValueError(
            f"got fuse with drafter {', '.join(names) or 'none'}, expected one of "
            f"{', '.join(one_pass)}: the fused step takes drafters that guess in one pass"
        )


def _require_attention(attention: str, form: str, fuse: bool) -> None:
    default = bundles.ATTENTIONS[0]
    if attention not in bundles.ATTENTIONS:
        expected = f"one of {', '.join(bundles.ATTENTIONS)}"
        raise ValueError(f"got attention {attention!r}, expected {expected}")
    if attention == default:
        return
    if form != "slots":
        raise ValueError(
            f"got attention {attention} with the {form} form, expected {default}: only the slots "
            "form for ONNX Runtime comes in several"
        )
    if fuse:
        raise ValueError(
            f"got fuse with attention {attention}, expected {default}: the fused step is made for "
            "that alone"
        )


def _known(names: list[str]) -> list[str]:
    known = [*drafter_files.trainable(), *BUILT_IN]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"got drafter {unknown[0]!r}, expected one of {', '.join(known)}")
    return [name for name in names if name not in BUILT_IN]


def shipped(name: str) -> Path | None:
    """The folder of the demo's drafter of this name inside the package, None if none is shipped."""
    folder = (
        Path(str(resources.files("spec_export"))) / "assets" / "drafters" / target.DEMO_NAME / name
    )
    return folder if (folder / "config.json").is_file() else None


def _checkpoints(
    source: target.Source, names: list[str], folders: Sequence[Path]
) -> list[checkpoint.SavedDrafter]:
    """Those in `folders`, then the shipped ones of the other `names`."""
    found = [checkpoint.load_drafter(folder) for folder in folders]
    given = [saved.name for saved in found]
    twice = [name for name in given if given.count(name) > 1]
    if twice:
        raise ValueError(f"got two checkpoints of {twice[0]!r}, expected one of each drafter")
    names = [name for name in names if name not in given]
    if source.kind != "demo":
        if names:
            raise ValueError(
                f"got drafter {names[0]!r} for {source.name} without weights: train it with "
                "spec-export train, then pass --drafter-checkpoint"
            )
        return found
    if not found and not names:
        return [_best_shipped()]
    for name in names:
        where = shipped(name)
        if where is None:
            raise ValueError(
                f"no {name} drafter is shipped for the demo: train one, then pass "
                "--drafter-checkpoint"
            )
        found.append(checkpoint.load_drafter(where))
    return found


def _best_shipped() -> checkpoint.SavedDrafter:
    """The shipped drafter of the greatest simulated accepted length."""
    folders = [folder for name in drafter_files.trainable() if (folder := shipped(name))]
    every = [checkpoint.load_drafter(folder) for folder in folders]
    return max(every, key=lambda saved: saved.provenance["validation"]["accepted_length"])


def _warn_of_doubts(saved: checkpoint.SavedDrafter, source: target.Source) -> None:
    """A wrong drafter changes no token, it only slows down: it is built, but not quietly."""
    about = saved.provenance
    origin = about.get("target")
    doubts = []
    if not about.get("steps"):
        doubts.append("is untrained (its provenance names no training steps)")
    if not about.get("validation"):
        doubts.append("was never validated")
    if origin != source.name:
        doubts.append(f"was trained for {origin or 'an unknown target'}, not for {source.name}")
    if doubts:
        console.print(
            f"[bold red]WARNING: drafter {saved.name} {', '.join(doubts)}: expect few accepted "
            "tokens; measure them with spec-export check[/]",
            soft_wrap=True,
        )


def _module(saved: checkpoint.SavedDrafter, backbone: Backbone) -> Any:
    """The drafter's module with its trained weights; ValueError names tensors that do not fit the
    target."""
    definition = drafter_files.load(saved.name)
    config = recipe.build_config(
        definition.Config, saved.config, f"{saved.path}/config.json config"
    )
    ids = None if saved.draft_token_ids is None else torch.from_numpy(saved.draft_token_ids)
    vocab_size = backbone.config.vocab_size
    if ids is not None and int(ids.max()) >= vocab_size:
        raise ValueError(
            f"{saved.path} guesses token ids up to {int(ids.max())}, the target has {vocab_size}: "
            "it was trained for another target"
        )
    module = definition.Drafter(config, target.ends(backbone), ids)
    saved.load_into(module)
    return module.eval()


def _pretrained(
    model: str, tokenizer: Any, vocab_size: int, length: int
) -> tuple[checkpoint.SavedDrafter, Any]:
    """A given language model as draft model. ValueError: another vocabulary, or a shorter
    context."""
    definition = drafter_files.load("draft_model")
    source = target.resolve(model)
    with console.status("loading the draft model"):
        hf_model, its_tokenizer = target.load(source)
    limit = hf_model.config.max_position_embeddings
    if limit < length:
        raise ValueError(
            f"got a draft model with a context of {limit} tokens, expected the bundle's {length}: "
            f"pass --max-length {limit} or less"
        )
    its_ids, rows = its_tokenizer.get_vocab(), hf_model.config.vocab_size
    definition.require_same_tokens(tokenizer.get_vocab(), its_ids, rows)
    backbone = Backbone.from_transformers(hf_model, (), length)
    saved = checkpoint.SavedDrafter(
        "draft_model", {}, {}, None, {"model": source.name, "source": source.kind}, source.path
    )
    return saved, definition.Pretrained(backbone, vocab_size, definition.Config())


def _write_graph(
    model: ir.Model, form: str, root: Path, file: str, lender: str | None = None
) -> bundles.Graph:
    if lender is None:
        onnx_export.save(model, root / file)
    else:
        onnx_export.save_beside(model, root / file, root / lender)
    return bundles.Graph(file, form, _specs(model.graph.inputs), _specs(model.graph.outputs))


def _write_fused(
    info: bundles.DrafterInfo, target_graph: bundles.Graph, root: Path
) -> bundles.Graph:
    """The fused step of this drafter: the target's weights stay in the target's file."""
    config = info.config
    num_masks = config.get("num_masks", 0)
    base = config.get("mask_token_base", 0)
    model = fuse_graphs(
        ir.load(root / target_graph.file),
        ir.load(root / info.graphs["drafter"].file),
        num_nodes=info.trees["max_nodes"],
        taps=config.get("taps", ()),
        mask_ids=range(base, base + num_masks),
        repeat_feature=config.get("mask_feature") == "anchor",
    )
    file = f"target/{bundles.fused_name(info.name)}.onnx"
    return _write_graph(model, "slots", root, file, target_graph.file)


def _specs(values: Any) -> tuple[bundles.TensorSpec, ...]:
    return tuple(
        bundles.TensorSpec(
            value.name,
            str(value.dtype.numpy()),
            tuple(size if isinstance(size, int) else str(size.value) for size in value.shape),
        )
        for value in values
    )


def _drafter_info(
    saved: checkpoint.SavedDrafter,
    module: Any,
    graphs: dict[str, bundles.Graph],
    trees: dict[str, Any],
    root: Path,
    target_parameters: int,
) -> bundles.DrafterInfo:
    """The manifest entry; `extra_memory` is the drafter's own parameters over the target's."""
    ids = None
    if saved.draft_token_ids is not None:
        ids = f"drafters/{saved.name}/draft_token_ids.npy"
        (root / ids).parent.mkdir(parents=True, exist_ok=True)
        np.save(root / ids, saved.draft_token_ids)
    own = sum(parameter.numel() for parameter in module.parameters())
    measured = saved.provenance.get("validation") or {}
    return bundles.DrafterInfo(
        name=saved.name,
        config=module.runtime_config()
        | {"parameters": own, "extra_memory": round(own / target_parameters, 4)},
        graphs=graphs,
        draft_token_ids=ids,
        calibration=None,
        trees=trees,
        expected_accepted_length=measured.get("accepted_length"),
    )


def _target_info(config: DecoderConfig, precision: str, is_modified: bool) -> bundles.TargetInfo:
    return bundles.TargetInfo(
        family=config.family,
        dims=bundles.Dims(
            config.vocab_size,
            config.hidden_size,
            config.num_layers,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
        ),
        precision=precision,
        max_length=config.max_length,
        scratch=config.scratch,
        rope={"type": config.rope.get("rope_type", "default")} | config.rope,
        taps=config.taps,
        position_convention="absolute",
        target_modified=is_modified,
    )


def _write_tokenizer(tokenizer: Any, model: Any, root: Path) -> bundles.TokenizerInfo:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(
            "the target has no fast tokenizer (tokenizer.json): convert it with transformers first"
        )
    backend.save(str(root / "tokenizer.json"))
    template = None
    if getattr(tokenizer, "chat_template", None):
        template = "chat_template.jinja"
        (root / template).write_text(tokenizer.chat_template, encoding="utf-8")
    ends = model.generation_config.eos_token_id if model.generation_config is not None else None
    ends = ends if isinstance(ends, list) else [ends]
    eos = sorted({i for i in (*ends, tokenizer.eos_token_id) if i is not None})
    return bundles.TokenizerInfo(
        file="tokenizer.json",
        sha256="",
        vocab_size=backend.get_vocab_size(),
        special_ids={"bos": tokenizer.bos_token_id, "eos": eos, "pad": tokenizer.pad_token_id},
        chat_template=template,
    )
