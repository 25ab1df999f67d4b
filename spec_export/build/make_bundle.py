"""Builds a bundle: loads the target and its drafters, writes their graphs and the manifest.

The bundle is put together in a temporary folder and renamed at the end, so that a build that fails
leaves nothing behind and any bundle that was there stays. Nothing but a bundle is ever replaced.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch

from spec_export import reference
from spec_export.build import drafters, manifest, needs, plans
from spec_export.build.drafters import LoadedDrafter
from spec_export.build.options import BuildOptions as BuildOptions
from spec_export.build.writer import TARGET, GraphWriter, save_graph
from spec_export.graphs import trace
from spec_export.graphs.banks import add_argmax, keep_drafter, keep_target, sampling_graph
from spec_export.graphs.edit import fixed_size
from spec_export.graphs.rounding import said_of
from spec_export.graphs.smooth import smooth
from spec_export.model import target
from spec_export.model.decoder import Backbone
from spec_export.report import SILENT, Report
from spec_export.training.checkpoint import SavedDrafter, collect_provenance
from spec_runtime.bundle import manifest as bundles
from spec_runtime.files.writing import replacing_folder

DEFAULT_MAX_LENGTH = 2048
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def build(options: BuildOptions, report: Report = SILENT) -> Path:
    """Builds a bundle and returns its folder, bundles/<target> by default.

    Raises UserError if a model or checkpoint cannot
    be loaded or does not fit the target, if the folder holds other files, or if another process is
    building there. Nothing is left half-written.
    """
    options.require_files()  # before a target is downloaded
    source = target.resolve(options.model, report, options.base)
    out = options.out or Path("bundles") / source.name
    with replacing_folder(out, bundles.own_files, "a bundle") as folder:
        saved = drafters.choose(options, source, report)
        plan_builder = plans.open_builder(options, replaced=out)
        for drafter in saved:
            drafters.warn_of_doubts(drafter, source, report)
        target.local_folder(source)  # a download has bars of its own
        if options.backend == "tensorrt":
            target.require_standard_operators(source)
        with report.stages(_num_stages(options, saved)):
            models = _load(options, source, saved, out, report)
            result = _write_graphs(models, options, folder, report)
            if plan_builder is not None:
                result = plans.with_plans(result, plan_builder, options, folder, report)
            with report.stage("hashing the files"):
                bundles.write_manifest(folder, result)

    if not options.trained_drafters and not models.drafters:
        report.line(
            f"no drafter is trained for {source.name}: the bundle drafts by prompt lookup. "
            "To train one: spec-export distill, then spec-export train RECIPE"
        )
    return out


def _num_stages(options: BuildOptions, saved: list[SavedDrafter]) -> int:
    """Counts the stages that a build reports; those of TensorRT plans are known later."""
    loading_and_exporting = 2 * (options.draft_model is not None)
    return 3 + len(saved) + loading_and_exporting  # the target's two, a drafter each, hashing


# ---- loading ----


@dataclass(frozen=True)
class Models:
    """Holds the models of one build: the target as transformers has it and as a traceable backbone,
    and its drafters."""

    source: target.Source
    hf_model: Any
    tokenizer: Any
    backbone: Backbone
    drafters: list[LoadedDrafter]


def _load(
    options: BuildOptions,
    source: target.Source,
    saved: list[SavedDrafter],
    out: Path,
    report: Report,
) -> Models:
    """Opens the target, whose weights are read a layer at a time, and gives every drafter its own.

    Drafters borrow from the target in float32; only the target takes its own type.
    """
    with report.stage("loading the target"):
        hf_model, weights, tokenizer = target.open_weights(source)
    said = target.weights_said(source)
    if said is not None:
        report.line(f"{source.name}: {said}")
    manifest.require_fitting_tokens(tokenizer, hf_model)
    raw, length = hf_model.config, options.max_length
    if length is None:
        length = min(DEFAULT_MAX_LENGTH, raw.max_position_embeddings)
    loaded = []
    if options.draft_model is not None:
        with report.stage("loading the draft model"):
            draft_model = drafters.load_draft_model(
                options.draft_model, tokenizer, raw.vocab_size, length, report
            )
            loaded.append(draft_model)
    taps = tuple(sorted({tap for drafter in saved for tap in drafters.taps_of(drafter)}))
    narrow = weights.to(DTYPES.get(options.target_precision, torch.float32))
    backbone = Backbone.deferred(raw, narrow, taps, length)
    needs.say(needs.foretell(options, backbone, saved, loaded), out, report)
    if saved:
        wide = Backbone.deferred(raw, weights, (), length)
        ends = target.ends(wide)
        loaded += [
            LoadedDrafter(each, drafters.load_module(each, wide.config, ends)) for each in saved
        ]
    for each in loaded:
        if each.module.fusion is not None:
            backbone.add_fusion(each.saved.name, each.module.fusion)
    return Models(source, hf_model, tokenizer, backbone, loaded)


# ---- graphs and manifest ----


def _write_graphs(
    models: Models, options: BuildOptions, folder: Path, report: Report
) -> bundles.Manifest:
    """Writes all graphs and the tokenizer; returns the manifest without the files' hashes."""
    writer = GraphWriter(options, folder, models.backbone.config.rows)
    with report.stage("exporting the target"):
        traced = _trace_target(models, options)
        graphs = _write_target(writer, traced)
    infos = []
    for loaded in models.drafters:
        with report.stage(f"exporting {loaded.saved.name}"):
            info = write_drafter(writer, loaded, models, traced, graphs["target"])
            infos.append(info)
            graphs |= write_draft_lanes(writer, loaded, info)
    rounding = writer.rounding.facts()
    if rounding is not None:
        report.line(f"{models.source.name}: {said_of(rounding)}")
    return _manifest(models, options, graphs, infos, folder, rounding)


def _trace_target(models: Models, options: BuildOptions) -> ir.Model:
    """Returns the target's graph in the contiguous form; int8 is smoothed before.

    On a GPU the graph also finds the argmax, so that greedy decoding copies few numbers.
    """
    backbone = models.backbone
    if options.target_precision == "int8":
        smoothing_texts = [reference.encode(models.tokenizer, text) for text in reference.prompts()]
        texts = [ids[: backbone.config.max_length] for ids in smoothing_texts]
        smooth(backbone, texts, head_only=target.expects_int8(models.source))
    traced = trace.export_backbone(backbone)
    return add_argmax(traced) if options.is_for_gpu else traced


def _write_target(writer: GraphWriter, traced: ir.Model) -> dict[str, bundles.Graph]:
    """Writes the target's graph, for a GPU the one that finds the largest logits, and for int8 the
    probe that products are exact on a CPU."""
    options = writer.options
    graphs = {"target": writer.write(traced, TARGET, add_banks=keep_target)}
    graphs |= writer.write_lanes(graphs["target"])
    if options.device == "cuda":
        logits = next(value for value in traced.graph.outputs if value.name == "logits")
        model, file = sampling_graph(fixed_size(logits, 1)), "target/sampling.onnx"
        graphs[bundles.SAMPLING] = save_graph(model, "stateless", writer.folder, file)
    return graphs


def write_drafter(
    writer: GraphWriter,
    drafter: LoadedDrafter,
    models: Models,
    traced_target: ir.Model,
    target_graph: bundles.Graph,
) -> bundles.DrafterInfo:
    """Writes the graphs of one drafter and returns its manifest entry.

    They lie beside the target and share its weights' file, from which they read the tables that
    they have in common; TensorRT's plans are built of graphs that have all of their own.
    """
    options, module, name = writer.options, drafter.module, drafter.saved.name
    backbone, precision = models.backbone, options.precision_of(module)
    add_banks: Callable[[ir.Model], ir.Model] | None = None
    if module.shares_target_cache:
        exported = module.export_from_target(backbone)
    else:
        exported = module.export(backbone.config)
        add_banks = partial(
            keep_drafter,
            target=traced_target,
            config=drafter.runtime_config(),
            scratch=backbone.config.scratch,
        )
    is_beside = module.shares_target_cache or options.graph_form == "slots"
    graphs = {
        role: writer.write(
            model,
            f"target/{name}-{role}.onnx" if is_beside else f"drafters/{name}/{role}.onnx",
            add_banks=add_banks,
            lender=target_graph if is_beside else None,
            precision=precision,
        )
        for role, model in exported.items()
    }
    num_parameters = models.hf_model.num_parameters()
    return manifest.drafter_info(
        drafter, graphs, options.tree, writer.folder, num_parameters, precision
    )


def write_draft_lanes(
    writer: GraphWriter, drafter: LoadedDrafter, info: bundles.DrafterInfo
) -> dict[str, bundles.Graph]:
    """Writes what runs a drafter's graphs for several lanes, where their rows are independent."""
    graphs: dict[str, bundles.Graph] = {}
    for role, graph in info.graphs.items():
        is_for_cpu = graph.form == "slots" and not writer.options.is_for_gpu
        if is_for_cpu and not drafter.module.mixes_rows:
            graphs |= writer.write_lanes(graph, bundles.draft_name(info.name, role))
    return graphs


def _manifest(
    models: Models,
    options: BuildOptions,
    graphs: dict[str, bundles.Graph],
    infos: list[bundles.DrafterInfo],
    folder: Path,
    rounding: dict[str, Any] | None,
) -> bundles.Manifest:
    """Writes the tokenizer and returns the manifest; the files' hashes are filled in on writing.

    rounding: see `Rounding.facts`.
    """
    about = {loaded.saved.name: loaded.saved.provenance for loaded in models.drafters}
    is_modified = any(provenance.get("target_modified") for provenance in about.values())
    return bundles.Manifest(
        schema_version=bundles.SCHEMA_VERSION,
        name=models.source.name,
        target=manifest.target_info(models.backbone.config, options.target_precision, is_modified),
        graphs=graphs,
        drafters=tuple(infos),
        tokenizer=manifest.write_tokenizer(
            models.tokenizer, models.hf_model, folder, target.tokenizer_file(models.source)
        ),
        provenance=collect_provenance(
            model=models.source.name, source=models.source.kind, drafters=about, rounding=rounding
        ),
        files={},
    )
