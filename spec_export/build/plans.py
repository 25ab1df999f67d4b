"""Adds TensorRT plans to a bundle that is being built, and shows what they cost."""

from dataclasses import replace
from pathlib import Path

from spec_export.build.options import BuildOptions
from spec_export.graphs.tensorrt import PlanBuilder, profiles_for
from spec_export.report import Report
from spec_runtime.bundle import manifest as bundles
from spec_runtime.files.writing import sha256


def open_builder(options: BuildOptions, replaced: Path) -> PlanBuilder | None:
    """Returns the builder of the plans asked for; None if the build is not for TensorRT.

    Intact plans of the bundle at `replaced` are taken over where they still fit. Raises UserError
    if TensorRT is not installed or does not build for the GPUs named.
    """
    if options.backend != "tensorrt":
        return None
    return PlanBuilder(options.compute_capabilities, _plans_in(replaced))


def _plans_in(folder: Path) -> dict[str, Path]:
    """Returns the intact plans of the bundle in `folder`, if there is one, by file name."""
    try:
        manifest = bundles.read(folder, verify=False).manifest
    except (bundles.BundleError, OSError):
        return {}
    named = {name: folder / name for name in manifest.files if name.endswith(".plan")}
    return {path.name: path for name, path in named.items() if sha256(path) == manifest.files[name]}


def with_plans(
    manifest: bundles.Manifest,
    builder: PlanBuilder,
    options: BuildOptions,
    folder: Path,
    report: Report,
) -> bundles.Manifest:
    """Builds a plan of each graph for each GPU and returns the manifest with them.

    Reports a table of the plans' sizes and build times.
    """
    num_nodes = int(options.tree["max_nodes"] + options.tree["lookup_nodes"])
    graphs = dict(manifest.graphs)
    for info in manifest.drafters:
        graphs |= {f"{info.name}-{role}": graph for role, graph in info.graphs.items()}
    report.expect(len(graphs))
    rows = []
    for name, graph in graphs.items():
        with report.stage(f"building the plans of {name}"):
            profiles = profiles_for(graph, num_nodes, manifest.target.scratch)
            graphs[name], built = builder.add_plans(folder, name, graph, profiles)
        for each in built:
            size = f"{each.num_bytes / 1e6:.1f}"
            rows.append((name, each.plan.compute_capability, size, f"{each.seconds:.1f}"))
    report.table(("graph", "GPU", "plan MB", "build seconds"), rows)
    infos = [
        replace(info, graphs={role: graphs[f"{info.name}-{role}"] for role in info.graphs})
        for info in manifest.drafters
    ]
    own = {name: graphs[name] for name in manifest.graphs}
    return replace(manifest, graphs=own, drafters=tuple(infos))
