"""Makes tiny targets, drafters and bundles the real way, each once for all processes of a run."""

import json
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from filelock import FileLock
from tiny_target import save_llama, teach

from spec_export import drafters
from spec_export.build import make_bundle
from spec_export.build.make_bundle import BuildOptions
from spec_export.build.options import DRAFTER_PRECISIONS
from spec_export.model import target
from spec_export.model.decoder import Backbone
from spec_export.report import SILENT, Report
from spec_export.training import checkpoint
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
max_steps = {num_steps}
lr = {lr}
precision = "fp32"
[export]
draft_vocab = 80
"""
# Fields of a drafter's config, where the defaults would leave a part of it untested.
OPTIONS = {
    "parallelspec": 'taps = [1]\nmask_feature = "anchor"',
    "hydra": "prefix_layer = true",
    "dflash": (
        "taps = [1, 2]\nlayers = 1\nblock_size = 4\nmarkov_rank = 64\nanchor_fraction = 1.0\n"
        "sample_from_anchor = true"
    ),
    "eagle3": "taps = [1, 2]\nfc_norm = true\nnorm_output = true",
    "peagle": "taps = [1, 2]\nnorm_before_fc = true\nmask_token_id = 5",
    "pard": (
        "num_masks = 3\nmask_token_id = 98\nanchor_fraction = 1.0\n"
        'model = { model_type = "llama", vocab_size = 99, hidden_size = 64, intermediate_size = 96,'
        " num_hidden_layers = 2, num_attention_heads = 4, max_position_embeddings = 256,"
        " initializer_range = 0.15 }"
    ),
    "skip_layer": "layers = 1",
    "draft_model": "hidden_size = 64\nintermediate_size = 96\nlayers = 2\nnum_heads = 4",
}

HYBRID = "lfm2:"  # before the name of a drafter whose target is a hybrid


def drafter_name(variant: str) -> str:
    """Returns the drafter that a variant is of: "lfm2:medusa" -> "medusa"."""
    return variant.removeprefix(HYBRID)


class Workshop:
    """Makes what is asked for under `folder`. The files it returns are shared: do not change them.

    The target has heads of 64, as real ones do: CUDA has kernels by that size. It is random and its
    drafters are trained for two steps, which is enough for every test that does not need drafts to
    be right.
    """

    num_steps = 2
    lr = 1e-3
    target: Mapping[str, Any] = MappingProxyType({"head_dim": 64})  # options of save_llama

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)

    def _once(self, name: str, make: Callable[[], Path]) -> Path:
        """Returns what `make` returned in this process or another one, which is waited for."""
        made = self.folder / f"{name}.made"
        with FileLock(self.folder / f"{name}.lock"):
            if not made.exists():
                made.write_text(str(make()))
        return Path(made.read_text())

    def llama(self) -> Path:
        """Returns the target's folder, beside which lie the rows that drafters learn from."""
        return self._once("llama", self._llama_and_rows)

    def drafter(self, name: str) -> Path:
        """Returns a checkpoint trained as `spec-export train` does."""
        return self._once(name, lambda: self._drafter(name))

    def bundle(self, drafter: str, precision: str = "fp32") -> Path:
        """Returns a bundle whose drafter has the target's precision, to be compared with torch."""
        return self._once(
            f"{drafter}-{precision}", lambda: self._bundle(drafter, precision=precision)
        )

    def every(self, precision: str = "fp32", lanes: int = 3) -> Path:
        """Returns a bundle with every trainable drafter, in the target's precision."""
        return self._once(f"every-{precision}", lambda: self._every(precision, lanes))

    def lanes(self, precision: str, names: Sequence[str] = ()) -> Path:
        """Returns a bundle for CUDA with drafters, all if none is named, and two lanes."""
        names, out = names or drafters.trainable(), self.folder / "bundles" / f"cuda-{precision}"
        options: dict[str, Any] = {"precision": precision, "device": "cuda", "lanes": 2}
        return self._once(f"lanes-{precision}", lambda: self.build(out, *names, **options))

    def _llama(self) -> Path:
        """Returns a target large enough for every product but the last to be quantised."""
        sizes = {"hidden_size": 64, "intermediate_size": 96}
        return save_llama(self.folder / "llama", **sizes | dict(self.target))

    def _llama_and_rows(self) -> Path:
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
        return self._llama()

    def _drafter(self, name: str) -> Path:
        self.llama()
        recipe = self.folder / f"{name}.toml"
        recipe.write_text(self.recipe(name, OPTIONS.get(name, "")))
        return train.run(recipe, out=self.folder / "runs" / name)

    def recipe(self, name: str, options: str) -> str:
        """Returns a recipe for this workshop's target; `options` are lines of its [drafter]."""
        drafter = drafter_name(name)
        return RECIPE.format(name=drafter, options=options, num_steps=self.num_steps, lr=self.lr)

    def build(self, out: Path, *names: str, report: Report = SILENT, **options: Any) -> Path:
        """Builds a bundle with these trained drafters. `options` are those of the build."""
        checkpoints = [self.drafter(name) for name in names]
        known: dict[str, Any] = {"model": str(self.llama()), "drafter_checkpoints": checkpoints}
        known["lanes"] = 1
        return make_bundle.build(BuildOptions(**known | {"out": out} | options), report)

    def _bundle(self, *names: str, precision: str, lanes: int = 1) -> Path:
        return self.build(
            self.folder / "bundles" / f"{'every' if len(names) > 1 else names[0]}-{precision}",
            *names,
            precision=precision,
            drafter_precision=precision if precision in DRAFTER_PRECISIONS else None,
            lanes=lanes,
        )

    def _every(self, precision: str, lanes: int) -> Path:
        return self._bundle(*drafters.trainable(), precision=precision, lanes=lanes)


class UntrainedWorkshop(Workshop):
    """A workshop of another kind of target, by options of `save_llama`; its drafters are untrained,
    and have the options that add operators."""

    def __init__(self, folder: Path, kind: Mapping[str, Any]) -> None:
        super().__init__(folder)
        self.target = {**Workshop.target, **kind}

    def _drafter(self, name: str) -> Path:
        model, _ = target.load(target.resolve(str(self.llama())))
        definition = drafters.load(name)
        config = definition.Config(**tomllib.loads(OPTIONS.get(name, "")))
        module = definition.Drafter(config, target.ends(Backbone.from_transformers(model)))
        out = self.folder / "drafters" / name
        return checkpoint.save_drafter(out, module.state_dict(), name, config, {})


class FluentWorkshop(Workshop):
    """A workshop whose drafters are often right, for tests of what follows accepted drafts.

    Its target has learned to repeat `WORDS` and its drafters were trained on such texts. Behind
    "say abc, 3" whole paths are accepted; other prompts put the target's text where it is noise, so
    that drafts are rejected too.
    """

    num_steps = 40
    lr = 5e-3

    def _llama(self) -> Path:
        return teach(super()._llama(), WORDS)


class HybridWorkshop(FluentWorkshop):
    """A fluent workshop whose target is an LFM2 with convolutions before and after attention."""

    target = MappingProxyType(
        {
            "family": "lfm2",
            "num_hidden_layers": 3,
            "layer_types": ["conv", "full_attention", "conv"],
            "block_auto_adjust_ff_dim": False,
        }
    )
