"""Finds and loads the drafters of a build, and refuses those that it cannot take."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from spec_export import drafters as drafter_files
from spec_export.build.options import BuildOptions
from spec_export.model import annex, target
from spec_export.model.decoder import Backbone, DecoderConfig
from spec_export.model.ends import TargetEnds
from spec_export.report import Report
from spec_export.training import folders, recipe
from spec_export.training.checkpoint import SavedDrafter, load_drafter
from spec_runtime.bundle.manifest import FUSED, feature_names
from spec_runtime.errors import UserError


@dataclass(frozen=True)
class LoadedDrafter:
    """A drafter with its weights in memory: what was saved, and the module that runs it."""

    saved: SavedDrafter
    module: Any  # a drafter file's Drafter, or draft_model.Pretrained

    def runtime_config(self) -> dict[str, Any]:
        """Returns what the manifest says of it, with the target's outputs that it reads."""
        features = feature_names(taps_of(self.saved))
        if self.module.fusion is not None:
            features = (f"{FUSED}{self.saved.name}",)
        return self.module.runtime_config() | {"features": list(features)}


def taps_of(saved: SavedDrafter) -> tuple[int, ...]:
    """Returns the target layers whose states a drafter reads as they are."""
    fuses = drafter_files.load(saved.name).Drafter.fuses_taps
    return () if fuses else tuple(saved.config.get("taps", ()))


# ---- finding ----


def read(
    place: Path, source: target.Source, report: Report, is_measured: bool = True
) -> SavedDrafter:
    """Returns the drafter in a folder, or what another library's is as one of ours."""
    if not folders.is_foreign(place):
        return load_drafter(place)
    saved: SavedDrafter = annex.importer.read(
        str(place), source, is_measured=is_measured, report=report
    )
    return saved


def choose(options: BuildOptions, source: target.Source, report: Report) -> list[SavedDrafter]:
    """Returns the trained drafters that the bundle gets.

    These are the checkpoints given, then the shipped drafters of the other names given. The demo
    gets its best shipped drafter if nothing is named. A pretrained draft model is not among them.

    Raises UserError if a checkpoint is missing, unreadable or given twice, or if the build cannot
    take a drafter.
    """
    names = options.trained_drafters
    only_built_in = bool(options.drafters) and not names and not options.drafter_checkpoints
    saved = []
    if not only_built_in and options.draft_model is None:
        found = [read(each, source, report) for each in options.drafter_checkpoints]
        saved = _with_shipped(source, names, found)
    if options.graph_form == "contiguous":
        _require_own_cache(saved, options)
    return saved


def _with_shipped(
    source: target.Source, names: Sequence[str], found: list[SavedDrafter]
) -> list[SavedDrafter]:
    """Adds the shipped drafters of the other `names` to those found; see `choose`."""
    given = [saved.name for saved in found]
    twice = [name for name in given if given.count(name) > 1]
    if twice:
        raise UserError(f"got two checkpoints of {twice[0]!r}, expected one of each drafter")
    names = [name for name in names if name not in given]
    if source.kind != "demo":
        if names:
            raise UserError(
                f"got drafter {names[0]!r} for {source.name} without weights: train it with "
                "spec-export train, then pass --drafter-checkpoint"
            )
        return found
    if not found and not names:
        return [_best_shipped()]
    return [*found, *(shipped_drafter(name) for name in names)]


def _shipped_folder(name: str) -> Path | None:
    """Returns the folder of the demo's drafter of this name in the package, None without one."""
    assets = Path(str(resources.files("spec_export"))) / "assets"
    folder = assets / "drafters" / target.DEMO_NAME / name
    return folder if (folder / "config.json").is_file() else None


def shipped_drafter(name: str) -> SavedDrafter:
    """Reads the demo's drafter of this name; raises UserError if none is shipped."""
    folder = _shipped_folder(name)
    if folder is None:
        raise UserError(
            f"no {name} drafter is shipped for the demo: train one, then pass --drafter-checkpoint"
        )
    return load_drafter(folder)


def _best_shipped() -> SavedDrafter:
    """Returns the shipped drafter of the greatest simulated accepted length."""
    found = [folder for name in drafter_files.trainable() if (folder := _shipped_folder(name))]
    every = [load_drafter(folder) for folder in found]
    return max(every, key=lambda saved: saved.provenance["validation"]["accepted_length"])


# ---- refusing and warning ----


def _require_own_cache(saved: Sequence[SavedDrafter], options: BuildOptions) -> None:
    """Raises UserError if a drafter runs on the target's cache, which needs the slots form."""
    got = "the tensorrt backend" if options.backend == "tensorrt" else "the contiguous form"
    for drafter in saved:
        if drafter_files.load(drafter.name).Drafter.shares_target_cache:
            raise UserError(
                f"got drafter {drafter.name} with {got}, expected another one: it shares the "
                "target's cache, which the contiguous form does not allow"
            )


def warn_of_doubts(saved: SavedDrafter, source: target.Source, report: Report) -> None:
    """Reports a warning if the drafter looks untrained, unvalidated or made for another target.

    Such a drafter is built all the same: it changes no token, it only costs time.
    """
    about = saved.provenance
    origin = about.get("target")
    doubts = []
    imported = about.get("imported")
    if imported is not None:
        doubts += [f"was imported with a doubt ({doubt})" for doubt in imported["doubts"]]
    elif not about.get("steps"):
        doubts.append("is untrained (its provenance names no training steps)")
    if imported is None and not about.get("validation"):
        doubts.append("was never validated")
    weights = about.get("target_fingerprint")
    if weights is not None and weights != target.fingerprint(source):
        doubts.append(f"was trained for other weights than those of {source.name}")
    elif weights is None and origin != source.name:
        doubts.append(f"was trained for {origin or 'an unknown target'}, not for {source.name}")
    if doubts:
        report.warning(
            f"WARNING: drafter {saved.name} {', '.join(doubts)}: expect few accepted tokens; "
            "measure them with spec-export check"
        )


# ---- loading ----


def load_module(saved: SavedDrafter, target_config: DecoderConfig, ends: TargetEnds) -> Any:
    """Returns the drafter's module with its trained weights, in eval mode.

    ends: what it borrows of the target, see `target.ends`. Raises UserError, with the tensors'
    names, if the weights do not fit the target.
    """
    definition = drafter_files.load(saved.name)
    config = recipe.build_config(
        definition.Config, saved.config, f"{saved.path}/config.json config"
    )
    ids = None if saved.draft_token_ids is None else torch.from_numpy(saved.draft_token_ids)
    vocab_size = target_config.vocab_size
    if ids is not None and int(ids.max()) >= vocab_size:
        raise UserError(
            f"{saved.path} guesses token ids up to {int(ids.max())}, the target has {vocab_size}: "
            "it was trained for another target"
        )
    trained, built = saved.provenance.get("rope_factors"), target_config.rope_factors
    if trained is not None and trained != built:
        warnings.warn(
            f"{saved.path} learnt with the target's {trained} rotary factors, this bundle has the "
            f"{built} ones: its guesses are worse; build with another --max-length, or train with "
            "a data.max_length on the same side of the target's original context",
            stacklevel=2,
        )
    module = definition.Drafter(config, ends, ids)
    saved.load_into(module)
    if saved.bigrams is not None:
        module.add_bigrams(saved.bigrams)
    return module.eval()


def load_draft_model(
    model: str, tokenizer: Any, vocab_size: int, length: int, report: Report
) -> LoadedDrafter:
    """Loads a causal LM as it is, to be the draft model of a target with this tokenizer.

    model: as `--model` takes it. vocab_size: the target's. length: the bundle's context in tokens.
    Raises UserError if the vocabularies differ or the model's context is shorter than `length`.
    """
    definition = drafter_files.load("draft_model")
    source = target.resolve(model, report)
    hf_model, weights, its_tokenizer = target.open_weights(source)
    limit = hf_model.config.max_position_embeddings
    if limit < length:
        raise UserError(
            f"got a draft model with a context of {limit} tokens, expected the bundle's {length}: "
            f"pass --max-length {limit} or less"
        )
    its_ids, rows = its_tokenizer.get_vocab(), hf_model.config.vocab_size
    definition.require_same_tokens(tokenizer.get_vocab(), its_ids, rows)
    backbone = Backbone.deferred(hf_model.config, weights, (), length)
    provenance = {"model": source.name, "source": source.kind}
    saved = SavedDrafter("draft_model", {}, {}, None, provenance, source.path)
    return LoadedDrafter(saved, definition.Pretrained(backbone, vocab_size, definition.Config()))
