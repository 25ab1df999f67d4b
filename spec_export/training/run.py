"""Trains a drafter from a recipe: reads the data, chooses the trainer, and writes the drafter.

With a frozen target its features are computed once and stored, or, as by default on a GPU, in each
step, and the drafter is trained on them (trainer.py). With a [joint] section an adapter on the
target trains too (joint.py).
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.utils import parse_flag_from_env

from spec_export import drafters
from spec_export.model import target
from spec_export.model.config import read_config
from spec_export.model.decoder import Backbone
from spec_export.model.ends import TargetEnds
from spec_export.report import SILENT, Report
from spec_export.training import bigrams, checkpoint, data, features, inputs, needs, recipe
from spec_export.training.allocator import keep_big_blocks
from spec_export.training.batches import TokenStore
from spec_export.training.folders import BEST, CHECKPOINTS
from spec_export.training.precision import fast_precision
from spec_export.training.shards import shard
from spec_export.training.trainer import Drafts, Trainer, TrainingJob
from spec_runtime.errors import UserError
from spec_runtime.files import writing as files


def run(
    recipe_path: Path,
    overrides: list[str] | None = None,
    out: Path | None = None,
    resume: bool = False,
    cache: Path | None = None,
    init: Path | None = None,
    trackers: Sequence[str] = (),
    report: Report = SILENT,
    drafts: Drafts | None = None,
) -> Path:
    """Trains as the recipe says and returns the drafter's folder (`drafter.safetensors`,
    `config.json`); the curves are in the folder above it.

    out: the folder for checkpoints and drafter (runs/<recipe's stem> by default); cache: the
    feature cache (out/features); init: a drafter of the same shape to start from, or the run that
    made it. If it learnt an output head of its own, its draft vocabulary is taken over too.
    drafts: measures a drafter in the runtime, for recipes with `validate.engine`, see
    check/drafting.py.
    trackers: some of `inputs.TRACKERS`, which get the curves; TensorBoard's events are in `out`.
    Raises UserError on a bad recipe, bad data or a bad checkpoint, if the answers are of another
    target, if `out` holds a run already and `resume` is not set, if it holds none and `resume` is
    set, if the training diverges, and if a tracker is unknown or not installed.
    """
    keep_big_blocks()
    plan, out = inputs.read(recipe_path, overrides or [], out, resume, init, trackers)
    module = drafters.load(plan.drafter_name)
    config = recipe.build_config(module.Config, plan.drafter_fields, f"{recipe_path} [drafter]")
    if plan.validate.engine and drafts is None:
        raise UserError(
            "got validate.engine and no `drafts`, expected what measures in the runtime"
        )
    source = target.resolve(plan.model, report, plan.base)
    if plan.train.precision == "auto":
        chosen = fast_precision()
        report.line(f"training in {chosen}, the faster on this machine")
        plan = replace(plan, train=replace(plan.train, precision=chosen))
    with _writing_alone(out):
        newest = checkpoint.latest(out / CHECKPOINTS)
        inputs.require_run(out, resume, newest)
        cache = cache or out / "features"
        trainer = _new_trainer(plan, module, config, source, out, cache, init, trackers, report)
        if plan.validate.engine:
            trainer.job = replace(trainer.job, drafts=drafts)
        if newest is not None:
            trainer.resume(newest)
        trainer.train()
        trainer.restore_best()
        return trainer.export()


@contextmanager
def _writing_alone(out: Path) -> Iterator[None]:
    """Keeps other runs out of the folder `out`, and removes what a killed run left half-written.

    Raises UserError if another run writes there already.
    The first of several launched processes speaks for all of them.
    """
    if int(os.environ.get("RANK", 0)):
        yield
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    with files.locked(out):
        for folder in (out, out / CHECKPOINTS, out / BEST):
            if folder.is_dir():
                files.restore_folders(folder)
        yield


def _new_trainer(
    plan: recipe.Recipe,
    module: ModuleType,
    config: Any,
    source: target.Source,
    out: Path,
    cache: Path,
    init: Path | None,
    trackers: Sequence[str],
    report: Report,
) -> Trainer:
    """Returns the trainer that the recipe asks for, at its first step; builds the feature cache."""
    fingerprint = target.fingerprint(source)
    if not plan.data.allow_other_target:
        data.require_target(plan.data_paths, source.name, fingerprint)
    taps = tuple(config.taps)
    outline, weights, tokenizer = target.open_weights(source)
    raw = outline.config
    decoder = read_config(raw, taps, min(plan.data.max_length, raw.max_position_embeddings))
    examples = data.read(plan.data_paths, tokenizer, decoder.max_length, plan.data.sources)
    data.require_vocabulary(examples, raw.vocab_size)
    training, held_out = data.split(examples, plan.data.validation_fraction)
    saved = None if init is None else _read_init(init, plan.drafter_name)
    ends = target.ends(Backbone.deferred(raw, weights, taps, decoder.max_length))
    drafter = _new_drafter(plan, module, config, ends, tokenizer, training)
    provenance = checkpoint.collect_provenance(
        recipe=plan.as_dict(), target=source.name, sources=data.source_counts(examples)
    )
    if decoder.rope_factors is not None:
        provenance["rope_factors"] = decoder.rope_factors
    if saved is not None:
        drafter = _started_from(saved, drafter, ends)
        provenance["init"] = checkpoint.origin(saved)
    table = None
    if plan.export.bigrams and drafter.is_one_pass:
        ids = drafter.draft_token_ids.cpu().numpy()
        table = bigrams.table(training, ids, raw.vocab_size)
        if table is not None:
            drafter.add_bigrams(table)  # validation reads it
    accelerator, wants_shards = _accelerator(trackers, out)
    report = report if accelerator.is_main_process else SILENT
    job = TrainingJob(plan, drafter, len(training), out, provenance, accelerator, table, report)
    report.line(f"{len(training)} sequences to train on, {len(held_out)} held out")
    target_weights = outline.num_parameters()
    if plan.joint is not None:
        from spec_export.training.joint import JointTrainer  # imports peft, which takes a while

        provenance["target_modified"] = True
        model, _ = target.load(source)
        trainer = JointTrainer(job, model, tokenizer, training + held_out, wants_shards)
        groups = trainer.parameter_groups()
        trained = [parameter for group in groups for parameter in group["params"]]
        needs.say(job, trainer.saved_state(), trained, target_weights, 0, bool(held_out))
        return trainer
    examples, stores = training + held_out, plan.data.store_features
    if stores == "auto":
        stores = accelerator.device.type != "cuda"
    size = 0
    if stores:
        size = features.size_estimate(examples, raw.hidden_size, len(taps))
    trained = [parameter for _, group in drafter.trained_groups() for parameter in group]
    needs.say(job, drafter, trained, target_weights, size, bool(held_out))
    dtype = torch.bfloat16 if plan.train.precision == "bf16" else torch.float32
    if not stores:
        model, _ = target.load(source, dtype)
        if wants_shards and accelerator.num_processes > 1:
            report.line(shard(model, model.model.layers, accelerator.device))
        model.to(accelerator.device)
        return Trainer(job, TokenStore(examples), partial(features.of_tokens, model, taps))
    if not features.is_built(cache, examples, raw.hidden_size, fingerprint, taps):
        model, _ = target.load(source, dtype)
        rank, ranks = accelerator.process_index, accelerator.num_processes
        model.to(accelerator.device)
        with report.progress("features") as advance:
            features.build(cache, examples, model, fingerprint, taps, advance, rank, ranks)
        del model  # training reads stored features
    return Trainer(job, features.FeatureCache(cache, taps))


def _new_drafter(
    plan: recipe.Recipe,
    module: ModuleType,
    config: Any,
    ends: TargetEnds,
    tokenizer: Any,
    training: Sequence[data.Example],
) -> Any:
    """Returns an untrained drafter for the target's `ends`, with the recipe's draft vocabulary."""
    draft_token_ids = None
    if plan.export.draft_vocab:
        counts_V = data.count_tokens(training, len(ends.embed_VD), plan.export.draft_vocab_prompts)
        chosen = data.most_frequent_tokens(
            counts_V, plan.export.draft_vocab, tokenizer.all_special_ids
        )
        draft_token_ids = torch.from_numpy(chosen)
    torch.manual_seed(plan.train.seed)
    return module.Drafter(config, ends, draft_token_ids)


def _read_init(init: Path, name: str) -> checkpoint.SavedDrafter:
    """Returns the drafter that a run starts from; raises UserError if it is of another kind."""
    saved = checkpoint.load_drafter(init)
    if saved.name != name:
        raise UserError(
            f"got --init {saved.path} with the weights of {saved.name}, expected those of {name}"
        )
    return saved


def _started_from(saved: checkpoint.SavedDrafter, drafter: Any, ends: TargetEnds) -> Any:
    """Returns the drafter with the weights of `saved`, another run's.

    The rows of a trained output head belong to the draft vocabulary that it was trained with, which
    then takes the place of the new data's. Raises UserError if the two differ otherwise in shape.
    """
    new_ids = drafter.draft_token_ids.numpy()
    old_ids = new_ids if saved.draft_token_ids is None else saved.draft_token_ids
    if drafter.trains_output_head and not np.array_equal(new_ids, old_ids):
        if len(new_ids) != len(old_ids):
            raise UserError(
                f"got --init {saved.path} with a head over {len(old_ids)} tokens, expected one "
                f"over {len(new_ids)}: set export.draft_vocab to {len(old_ids)}"
            )
        drafter = type(drafter)(drafter.config, ends, torch.from_numpy(old_ids))
    saved.load_into(drafter)
    return drafter


def _accelerator(trackers: Sequence[str], out: Path) -> tuple[Accelerator, bool]:
    """Returns the accelerator, and whether `accelerate launch` was asked for FSDP."""
    # accelerate's own FSDP would cut up the drafter, which is small and used outside of `forward`
    wants_shards = parse_flag_from_env("ACCELERATE_USE_FSDP")
    os.environ.pop("ACCELERATE_USE_FSDP", None)
    exchange = DistributedDataParallelKwargs(broadcast_buffers=False)
    log_with: Any = list(trackers) or None
    accelerator = Accelerator(log_with=log_with, project_dir=out, kwargs_handlers=[exchange])
    return accelerator, wants_shards
