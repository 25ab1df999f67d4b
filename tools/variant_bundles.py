"""Makes a bundle of each of several checkpoints of one drafter, on one target graph.

A bundle holds one drafter of a name, so variants need one each. The first variant with its taps is
built as `spec-export build` does; the others link that bundle's target and write their own drafter
beside it.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from spec_export import make_bundle, target
from spec_export.bundling import drafters, manifest
from spec_export.bundling.drafters import LoadedDrafter
from spec_export.bundling.options import BuildOptions
from spec_export.bundling.writer import GraphWriter
from spec_export.decoder import Backbone
from spec_export.training.checkpoint import SavedDrafter
from spec_runtime.bundle import manifest as bundles


class VariantBundles:
    """Opens bundles of variants under `folder`, all for the target `model` (None: the demo)."""

    def __init__(self, folder: Path, model: str | None, precision: str) -> None:
        self.folder, self.model, self.precision = folder, model, precision
        self._loaded: Any = None  # the target as transformers has it, once it is needed

    @contextmanager
    def bundle(self, saved: SavedDrafter) -> Iterator[Path]:
        """Gives the folder of a bundle with this drafter; removes it after.

        The first bundle is built from the files that the drafter was read from.
        """
        taps = saved.config.get("taps", ())
        base = self.folder / "-".join(["target", self.precision, *map(str, taps)])
        if not (base / bundles.MANIFEST).is_file():
            make_bundle.build(
                BuildOptions(
                    self.model, drafter_checkpoints=[saved.path], precision=self.precision, out=base
                )
            )
        with TemporaryDirectory(dir=self.folder, prefix="variant-") as temporary:
            folder = Path(temporary) / "bundle"
            self._write(saved, bundles.read(base, verify=False), folder)
            yield folder

    def _write(self, saved: SavedDrafter, base: bundles.Bundle, folder: Path) -> None:
        """Writes a bundle of this drafter; the target's and tokenizer's files are links."""
        own = shutil.ignore_patterns("drafters", bundles.MANIFEST)
        shutil.copytree(base.path, folder, copy_function=os.link, ignore=own)
        about = base.manifest
        if self._loaded is None:
            self._loaded = target.load(target.resolve(self.model))[0]
        backbone = Backbone.from_transformers(self._loaded, (), about.target.max_length)
        loaded = LoadedDrafter(saved, drafters.load_module(saved, backbone))
        options = BuildOptions(self.model, precision=self.precision)
        writer = GraphWriter(options, folder)
        precision = options.precision_of(loaded.module)
        graphs = {
            role: writer.write(graph, f"drafters/{saved.name}/{role}.onnx", precision=precision)
            for role, graph in loaded.module.export(backbone.config).items()
        }
        info = manifest.drafter_info(
            loaded, graphs, options.tree, folder, self._loaded.num_parameters(), precision
        )
        bundles.write_manifest(folder, dataclasses.replace(about, drafters=(info,), files={}))
