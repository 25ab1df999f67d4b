"""spec-runtime show: prints what a bundle holds, or a tree of one of its drafters.

Reads only the manifest; no graph is opened.
"""

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from spec_runtime.bundle import manifest as bundles
from spec_runtime.cli import options
from spec_runtime.cli.terminal import Console, visible
from spec_runtime.errors import UserError
from spec_runtime.files.mapping import to_json
from spec_runtime.files.writing import require_writable, write_atomically
from spec_runtime.proposers import BUILT_IN
from spec_runtime.trees import drawing, templates
from spec_runtime.trees.budget import RankPath


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
        bool,
        typer.Option(
            "--tree",
            help="Draw a static tree, with acceptance by the calibration, or estimated without one",
        ),
    ] = False,
    drafter: Annotated[
        str | None, typer.Option("--drafter", help="Whose tree", show_default="the bundle's first")
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
    as_json: Annotated[
        bool,
        typer.Option("--json", help="The manifest, with the folder and file sizes; or the tree"),
    ] = False,
) -> None:
    """Show a bundle: target, graphs, drafters, sizes, provenance; or a drafter's tree."""
    opened = bundles.read(bundle or bundles.find())
    if tree:
        entry, accuracy = _drafter_with_accuracy(opened, drafter)
        name, paths = _named_tree(entry, accuracy, template, nodes)
        _show_tree(entry, accuracy, name, paths, svg, as_json)
        return
    if any(option is not None for option in (template, drafter, nodes, svg)):
        raise UserError("got options of a tree, expected --tree with them")
    sizes = {name: opened.file(name).stat().st_size for name in opened.manifest.files}
    if as_json:
        manifest = to_json(opened.manifest)
        print(json.dumps({"bundle": str(opened.path), **manifest, "sizes": sizes}, indent=2))
        return
    Console().print(_table(opened, sizes))


def _drafter_with_accuracy(
    opened: bundles.Bundle, drafter: str | None
) -> tuple[bundles.DrafterInfo, templates.Accuracy]:
    """Returns the drafter of this name, None being the first, and how often its guesses are right:
    by its calibration, or about so by the validation of its training.

    Raises UserError if the bundle has no such drafter, or if it was never measured.
    """
    drafters = opened.manifest.drafters
    if drafter is None and not drafters:
        raise UserError(f"{opened.path} has no trained drafter, expected one whose tree to draw")
    entry = opened.manifest.drafter(drafters[0].name if drafter is None else drafter)
    if entry.calibration is not None:
        return entry, entry.calibration["accuracy"]
    about = opened.manifest.provenance.get("drafters")
    trained = about.get(entry.name) if isinstance(about, dict) else None
    validation = trained.get("validation") if isinstance(trained, dict) else None
    accuracy = templates.estimate_accuracy(validation)
    if accuracy is None:
        raise UserError(
            f"drafter {entry.name} has no calibration, which says how often a node is accepted: "
            f"run spec-export calibrate --bundle {opened.path}"
        )
    return entry, accuracy


def _named_tree(
    entry: bundles.DrafterInfo,
    accuracy: templates.Accuracy,
    template: str | None,
    nodes: int | None,
) -> tuple[str, tuple[RankPath, ...]]:
    """Returns the name and the paths of the tree asked for.

    Without `template` and `nodes` that is the drafter's own tree; if its trees are grown, the best
    static tree of their size stands for them.
    """
    if nodes is not None and template not in (None, "searched"):
        raise UserError(f"got --nodes with tree {template}, expected it only with searched")
    if nodes is None and template is None:
        own = templates.paths_of(entry)
        if own is not None:
            return "its own tree", own
    name = template or "searched"
    num_nodes = nodes or entry.trees.get("max_nodes", templates.DEFAULT_NODES)
    return name, templates.parse_tree(name, accuracy, num_nodes)


def _show_tree(
    entry: bundles.DrafterInfo,
    accuracy: templates.Accuracy,
    name: str,
    paths: Sequence[RankPath],
    svg: Path | None,
    as_json: bool,
) -> None:
    """Draws the tree into the file given, and prints it."""
    length = templates.expected_accepted_length(paths, accuracy)
    is_estimated = entry.calibration is None
    title = visible(
        f"{entry.name}, {name}: {len(paths) + 1} nodes, accepted length {length:.2f} "
        + ("estimated from the validation of its training" if is_estimated else "expected")
    )
    if svg is not None:
        require_writable(svg)
        write_atomically(svg, drawing.svg(paths, accuracy, title).encode())
    if as_json:
        probabilities = templates.path_probabilities(paths, accuracy)
        rows = [
            {"path": path, "acceptance": accuracy[len(path) - 1][path[-1]], "probability": p}
            for path, p in probabilities.items()
        ]
        about = {"drafter": entry.name, "accepted_length": length, "is_estimated": is_estimated}
        print(json.dumps({**about, "nodes": rows}))
        return
    Console().print(drawing.terminal(paths, accuracy, title))


def _table(opened: bundles.Bundle, sizes: dict[str, int]) -> Table:
    manifest = opened.manifest
    title = visible(f"{manifest.name} ({opened.path})")
    table = Table("", "", title=title, show_header=False)
    table.add_row("schema", str(manifest.schema_version))
    table.add_row("target", _target(manifest.target))
    table.add_row("graphs", Text("\n".join(_graph(*item) for item in manifest.graphs.items())))
    table.add_section()
    for drafter in manifest.drafters:
        table.add_row(f"drafter {visible(drafter.name)}", _drafter(drafter))
    for name in BUILT_IN:
        if name != "none":
            table.add_row(f"drafter {name}", "always there; no graph")
    table.add_section()
    sized = [f"{size / 1e6:10.2f} MB  {visible(name)}" for name, size in sizes.items()]
    total = f"{sum(sizes.values()) / 1e6:10.2f} MB  in all"
    table.add_row("files", Text("\n".join([*sized, total])))
    table.add_row("provenance", readable(dict(sorted(manifest.provenance.items()))))
    return table


def _target(target: bundles.TargetInfo) -> Text:
    dims = target.dims
    return Text(
        f"{visible(target.family)}, {target.precision}, context {target.max_length} tokens\n"
        f"{dims.num_layers} layers, width {dims.hidden_size}, vocabulary {dims.vocab_size}, "
        f"{dims.num_heads} heads over {dims.num_kv_heads} of {dims.head_dim}\n"
        f"rope {visible(target.rope.get('type', 'default'))}; taps {_plain(target.taps)}"
        + (", modified by its drafter" if target.target_modified else "")
    )


def _drafter(drafter: bundles.DrafterInfo) -> Group:
    graphs = "\n".join(_graph(*item) for item in drafter.graphs.items())
    parts: list[RenderableType] = [
        Text(graphs),
        readable(drafter.config),
        readable({"trees": drafter.trees}),
    ]
    if drafter.expected_accepted_length is not None:
        parts.append(Text(f"accepted length {drafter.expected_accepted_length:.2f} expected"))
    if drafter.calibration is not None:
        parts.append(Text(f"calibrated on {drafter.calibration['positions']} positions"))
        parts.append(readable({"accepted length by nodes": drafter.calibration["accepted_length"]}))
    return Group(*parts)


def _graph(role: str, graph: bundles.Graph) -> str:
    return visible(f"{role}: {graph.file}, form {graph.form}")


def readable(values: Mapping[str, Any]) -> Group:
    """Returns one line a key, with what a key holds indented under it if that has keys itself.

    Example: {"date": "2026-05-01", "train": {"lr": 0.001, "betas": [0.9, 0.95]}} gives

        date: 2026-05-01
        train:
          lr: 0.001
          betas: 0.9, 0.95
    """
    parts: list[RenderableType] = []
    for key, value in values.items():
        name = visible(key) or "(no name)"
        if isinstance(value, list | tuple) and any(isinstance(item, dict) for item in value):
            value = {str(number): item for number, item in enumerate(value, 1)}
        if isinstance(value, dict) and value:
            parts += [Text(f"{name}:"), Padding(readable(value), (0, 0, 0, 2))]
        elif key == "command" and isinstance(value, list):
            parts.append(Text(f"{name}: {visible(shlex.join(map(str, value)))}"))
        else:
            parts.append(Text(f"{name}: {_plain(value)}"))
    return Group(*parts)


def _plain(value: Any) -> str:
    """Returns a value without keys as text: [0.9, None] -> "0.9, none", [[0], [0, 1]] ->
    "(0), (0, 1)"."""
    if isinstance(value, list | tuple):
        items = [f"({_plain(v)})" if isinstance(v, list | tuple) else _plain(v) for v in value]
        return ", ".join(items) or "none"
    if value is None or value == {}:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else visible(value)
