"""Makes tiny targets, drafters and bundles the real way, each once for the whole session."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from tiny_target import save_llama

from spec_export import make_bundle
from spec_export.make_bundle import BuildOptions
from spec_export.training import run as train

WORDS = ("abc, ", "one two. ", "xyz", "0123 ")
RECIPE = """
[target]
model = "./llama"
[drafter]
name = "{name}"
{options}
[data]
path = "data.jsonl"
validation_fraction = 0.2
[train]
batch_tokens = 512
max_steps = 2
lr = 1e-3
precision = "fp32"
[export]
draft_vocab = 80
"""
# Fields of a drafter's config, where the defaults would leave a part of it untested.
OPTIONS = {
    "parallelspec": 'taps = [1]\nmask_feature = "anchor"',
    "hydra": "prefix_layer = true",
    "skip_layer": "layers = 1",
    "draft_model": "hidden_size = 64\nintermediate_size = 96\nlayers = 2\nnum_heads = 4",
}


class Workshop:
    """Makes everything under `folder`; nothing that a method returns may be changed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # These caches are not on the methods, because there they would outlive the folder.
        self.llama = cache(self._llama)
        self.drafter = cache(self._drafter)
        self.bundle = cache(self._bundle)

    def _llama(self) -> Path:
        """Saves a target large enough for every product but the last to be quantised."""
        return save_llama(self.folder / "llama", hidden_size=64, intermediate_size=96)

    def _drafter(self, name: str) -> Path:
        """Trains a drafter for two steps, as `spec-export train` does."""
        self.llama()
        rows = [
            [
                {"role": "user", "content": f"say {word}{i}"},
                {"role": "assistant", "content": word * (2 + i)},
            ]
            for word in WORDS
            for i in range(4)
        ]
        lines = [json.dumps({"messages": messages}) + "\n" for messages in rows]
        (self.folder / "data.jsonl").write_text("".join(lines))
        recipe = self.folder / f"{name}.toml"
        recipe.write_text(RECIPE.format(name=name, options=OPTIONS.get(name, "")))
        return train.run(recipe, out=self.folder / "runs" / name)

    def _bundle(self, drafter: str, precision: str = "fp32") -> Path:
        return make_bundle.build(
            BuildOptions(
                str(self.llama()),
                [drafter],
                [self.drafter(drafter)],
                precision,
                out=self.folder / "bundles" / f"{drafter}-{precision}",
            )
        )
