"""spec-runtime show: what a bundle holds, or a tree of one of its drafters, from its manifest alone
(no engine is started)."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from spec_runtime import bundle as bundles
from spec_runtime.cli import options
from spec_runtime.files import write_atomically
from spec_runtime.mapping import to_json
from spec_runtime.proposers import BUILT_IN
from spec_runtime.trees import drawing, templates


def command(
    template: Annotated[
        str | None,
        typer.Argument(
            help=f"With --tree: {templates.TEMPLATES}",
            show_default="the drafter's own, searched if its trees are grown",
        ),
    ] = None,
    bundle: options.Bundle = None,
    tree: Annotated[
        bool, typer.Option("--tree", help="Draw a static tree, with acceptance by the calibration")
    ] = False,
    drafter: Annotated[
        str | None,
        typer.Option("--drafter", help="Whose tree", show_default="the bundle's first"),
    ] = None,
    nodes: Annotated[
        int | None,
        typer.Option(
            "--nodes", min=2, help="Of a searched tree, root included", show_default="the bundle's"
        ),
    ] = None,
    svg: Annotated[
        Path | None, typer.Option("--svg", metavar="OUT", help="Draw the tree into this file")
    ] = None,
    png: Annotated[
        Path | None, typer.Option("--png", metavar="OUT", help="The same; needs matplotlib")
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="The manifest, with the folder and file sizes; or the tree"),
    ] = False,
) -> None:
    """Show a bundle: target, graphs, drafters, sizes, provenance; or a drafter's tree."""
    opened = bundles.read(bundle or bundles.find())
    if tree:
        _show_tree(opened, drafter, template, nodes, svg, png, as_json)
        return
    if any(option is not None for option in (template, drafter, nodes, svg, png)):
        raise ValueError("got options of a tree, expected --tree with them")
    sizes = {name: opened.file(name).stat().st_size for name in opened.manifest.files}
    if as_json:
        manifest = to_json(opened.manifest)
        print(json.dumps({"bundle": str(opened.path), **manifest, "sizes": sizes}, indent=2))
        return
    Console(highlight=False).print(_table(opened, sizes))


def _show_tree(
    opened: bundles.Bundle,
    drafter: str | None,
    template: str | None,
    nodes: int | None,
    svg: Path | None,
    png: Path | None,
    as_json: bool,
) -> None:
    drafters = opened.manifest.drafters
    if drafter is None and not drafters:
        raise ValueError(f"{opened.path} has no trained drafter, expected one whose tree to draw")
    entry = opened.manifest.drafter(drafters[0].name if drafter is None else drafter)
    if entry.calibration is None:
        raise ValueError(
            f"drafter {entry.name} has no calibration, which says how often a node is accepted: "
            f"run spec-export calibrate --bundle {opened.path}"
        )
    if nodes is not None and template not in (None, "searched"):
        raise ValueError(f"got --nodes with tree {template}, expected it with searched alone")
    accuracy = entry.calibration["accuracy"]
    paths = None if nodes is not None or template is not None else templates.paths_of(entry)
    name = template or ("searched" if paths is None else "its own tree")
    if paths is None:
        num_nodes = nodes or entry.trees.get("max_nodes", templates.DEFAULT_NODES)
        budget = templates.parse_tree(name, accuracy, num_nodes)
        paths = budget.paths or ()
    length = templates.expected_accepted_length(paths, accuracy)
    title = f"{entry.name}, {name}: {len(paths) + 1} nodes, accepted length {length:.2f} expected"
    if svg is not None:
        _write(svg, drawing.svg(paths, accuracy, title).encode())
    if png is not None:
        _write(png, drawing.png(paths, accuracy, title))
    if as_json:
        probabilities = templates.path_probabilities(paths, accuracy)
        rows = [
            {"path": path, "acceptance": accuracy[len(path) - 1][path[-1]], "probability": p}
            for path, p in probabilities.items()
        ]
        print(json.dumps({"drafter": entry.name, "accepted_length": length, "nodes": rows}))
        return
    Console(highlight=False).print(drawing.terminal(paths, accuracy, title))


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, content)


def _table(opened: bundles.Bundle, sizes: dict[str, int]) -> Table:
    manifest, target = opened.manifest, opened.manifest.target
    dims = target.dims
    table = Table("", "", title=f"{manifest.name} ({opened.path})", show_header=False)
    table.add_row("schema", str(manifest.schema_version))
    table.add_row(
        "target",
        f"{target.family}, {target.precision}, context {target.max_length} tokens\n"
        f"{dims.num_layers} layers, width {dims.hidden_size}, vocabulary {dims.vocab_size}, "
        f"{dims.num_heads} heads over {dims.num_kv_heads} of {dims.head_dim}\n"
        f"rope {target.rope.get('type', 'default')}, taps {list(target.taps)}"
        + (", modified by its drafter" if target.target_modified else ""),
    )
    table.add_row("graphs", "\n".join(_graph(role, g) for role, g in manifest.graphs.items()))
    table.add_section()
    for drafter in manifest.drafters:
        lines = [_graph(role, graph) for role, graph in drafter.graphs.items()]
        lines += [f"{key} {value}" for key, value in drafter.config.items()]
        lines += [f"trees: {_pairs(drafter.trees)}"]
        if drafter.expected_accepted_length is not None:
            lines.append(f"accepted length {drafter.expected_accepted_length:.2f} expected")
        if drafter.calibration is not None:
            lengths = drafter.calibration["accepted_length"]
            lines.append(
                f"calibrated on {drafter.calibration['positions']} positions, "
                f"accepted length by nodes: {_pairs(lengths)}"
            )
        table.add_row(f"drafter {drafter.name}", "\n".join(lines))
    for name in BUILT_IN:
        if name != "none":
            table.add_row(f"drafter {name}", "always there; no graph")
    table.add_section()
    sized = [f"{size / 1e6:10.2f} MB  {name}" for name, size in sizes.items()]
    table.add_row("files", "\n".join([*sized, f"{sum(sizes.values()) / 1e6:10.2f} MB  in all"]))
    table.add_row("provenance", "\n".join(f"{k}: {_plain(v)}" for k, v in _sorted(manifest)))
    return table


def _sorted(manifest: bundles.Manifest) -> list[tuple[str, Any]]:
    return sorted(manifest.provenance.items())


def _graph(role: str, graph: bundles.Graph) -> str:
    return f"{role}: {graph.file}, form {graph.form}"


def _pairs(values: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in values.items()) or "none"


def _plain(value: Any) -> str:
    return _pairs(value) if isinstance(value, dict) else str(value)
