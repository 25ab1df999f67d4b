"""spec-runtime show: prints what a bundle holds.

Reads only the manifest; no graph is opened.
"""

import json
import shlex
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from spec_runtime.bundle import manifest as bundles
from spec_runtime.cli import options
from spec_runtime.cli.terminal import Console, visible
from spec_runtime.files.mapping import to_json
from spec_runtime.proposers import BUILT_IN


def command(
    bundle: options.Bundle = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="The manifest, with the folder and file sizes")
    ] = False,
) -> None:
    """Show a bundle: target, graphs, drafters, sizes, provenance."""
    opened = bundles.read(bundle or bundles.find())
    sizes = {name: opened.file(name).stat().st_size for name in opened.manifest.files}
    if as_json:
        manifest = to_json(opened.manifest)
        print(json.dumps({"bundle": str(opened.path), **manifest, "sizes": sizes}, indent=2))
        return
    Console().print(_table(opened, sizes))


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
