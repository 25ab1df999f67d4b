"""Adds a drafter to a bundle that is there: the target is neither exported nor quantised again.

The new bundle is put together beside the old one, of copies of its files, and renamed at the end.
Hard links would do without the room, but onnx refuses to read weights through one.
"""

import shutil
from dataclasses import replace
from pathlib import Path

import onnx_ir as ir

from spec_export.build import drafters
from spec_export.build.drafters import LoadedDrafter
from spec_export.build.make_bundle import Models, write_draft_lanes, write_drafter
from spec_export.build.options import BuildOptions
from spec_export.build.writer import GraphWriter
from spec_export.model import target
from spec_export.model.decoder import Backbone
from spec_export.report import SILENT, Report
from spec_runtime.bundle import manifest as bundles
from spec_runtime.errors import UserError
from spec_runtime.files.writing import replacing_folder


def add(
    bundle: Path,
    checkpoint: Path,
    model: str | None = None,
    base: str | None = None,
    out: Path | None = None,
    report: Report = SILENT,
) -> Path:
    """Writes the bundle with one more drafter to `out`, or in the old one's place; returns its
    folder.

    checkpoint: as `build` takes it. model and base: the bundle's target, of which only embedding,
    head and last layer are read. Raises UserError if the drafter reads states that the bundle's
    target does not give, and as reading the two does.
    """
    old = bundles.read(bundle).manifest
    source = target.resolve(model, report, base)
    if source.name != old.name:
        raise UserError(f"got the model {source.name} for a bundle of {old.name}", param="model")
    saved = drafters.read(checkpoint, source, report)
    options = _options(old, bundle)
    if saved.name in [info.name for info in old.drafters]:
        raise UserError(f"{bundle} has a drafter {saved.name} already: build it again")
    drafters.warn_of_doubts(saved, source, report)
    hf_model, weights, tokenizer = target.open_weights(source)
    backbone = Backbone.deferred(hf_model.config, weights, (), old.target.max_length)
    module = drafters.load_module(saved, backbone.config, target.ends(backbone))
    drafter = LoadedDrafter(saved, module)
    _require_states(old, drafter, checkpoint)
    out = out or bundle
    with replacing_folder(out, bundles.own_files, "a bundle") as folder, report.stages(2):
        for name in old.files:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(bundle / name, folder / name)
        with report.stage(f"exporting {saved.name}"):
            models = Models(source, hf_model, tokenizer, backbone, [drafter])
            writer, graph = GraphWriter(options, folder, backbone.config.rows), old.graphs["target"]
            writer.attention = graph.attention
            info = write_drafter(writer, drafter, models, ir.load(folder / graph.file), graph)
            graphs = old.graphs | write_draft_lanes(writer, drafter, info)
        about = {**old.provenance["drafters"], saved.name: saved.provenance}
        new = replace(
            old,
            graphs=graphs,
            drafters=(*old.drafters, info),
            provenance=old.provenance | {"drafters": about},
        )
        with report.stage("hashing the files"):
            bundles.write_manifest(folder, new)
    return out


def _options(old: bundles.Manifest, bundle: Path) -> BuildOptions:
    """Returns the options that a bundle for a CPU was built with, its drafters' precision among
    them where all have the same."""
    graph = old.graphs["target"]
    on_device = [each.name for each in graph.inputs if each.name.startswith(bundles.BANK)]
    if on_device or graph.form != "slots" or old.target.precision in ("fp16", "bf16"):
        raise UserError(f"got {bundle}, which was built for a GPU: build it again with the drafter")
    lanes = [n for n in range(2, bundles.MAX_LANES + 1) if bundles.lanes_name(n) in old.graphs]
    precisions = {info.config.get("precision") for info in old.drafters}
    return BuildOptions(
        precision=old.target.precision,
        drafter_precision=precisions.pop() if len(precisions) == 1 else None,
        max_length=old.target.max_length,
        lanes=max(lanes, default=1),
    )


def _require_states(old: bundles.Manifest, drafter: LoadedDrafter, checkpoint: Path) -> None:
    """Raises UserError unless the bundle's target gives what the drafter reads."""
    given = {output.name for output in old.graphs["target"].outputs}
    missing = [name for name in drafter.runtime_config()["features"] if name not in given]
    if drafter.module.shares_target_cache:
        missing = ["the target's own layers"]
    if missing:
        raise UserError(
            f"{checkpoint} reads {', '.join(missing)}, which this bundle's target does not give: "
            "build the bundle again with all its drafters, --drafter-checkpoint for each"
        )
