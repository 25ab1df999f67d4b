"""spec-runtime show: what a bundle holds, from its manifest alone (no engine is started)."""

import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from spec_runtime import bundle as bundles
from spec_runtime.cli import options
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
        manifest = bundles.to_json(opened.manifest)
        print(json.dumps({"bundle": str(opened.path), **manifest, "sizes": sizes}, indent=2))
        return
    Console(highlight=False).print(_table(opened, sizes))


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
