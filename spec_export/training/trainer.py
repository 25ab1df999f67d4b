"""Runs the training loop: AdamW over batches of sequences, validated with the tree in use.

A drafter is used only through its `loss` and `guesses`. A step takes several batches, under
`accelerate launch` every process its share of them, and its loss is a mean over the answer tokens
of all. Each batch's randomness comes from (seed, step, its place in the step), so that a resumed
run repeats an uninterrupted one, and two processes draw what one would.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor

from spec_export.drafters.layers import Batch
from spec_export.report import SILENT, Report
from spec_export.training import batches, checkpoint, disk, folders, interruption, recipe, resume
from spec_export.training.average import WeightAverage
from spec_export.training.bigrams import Table
from spec_export.training.folders import BEST, CHECKPOINTS, DRAFTING
from spec_export.training.log import Log
from spec_export.training.validate import QUESTIONS, Validation, held_out_sequences, validate
from spec_runtime.errors import UserError
from spec_runtime.files.machine import give_back_memory
from spec_runtime.files.writing import remove_folder

# Steps after which freed memory goes back: batches have all sizes, and glibc keeps the gaps between
# them, 16 MB more with each step of the demo's drafter.
GIVE_BACK_EVERY = 50


# Returns the runtime's accepted length with a folder's drafter on sequences (token_T, loss_T).
Drafts = Callable[[recipe.Recipe, Path, Sequence[tuple[Tensor, Tensor]]], float]


@dataclass(frozen=True)
class TrainingJob:
    """The task that a trainer is given.

    The first `num_training` sequences train, the rest validates. `out` is the folder for
    checkpoints, curves and the drafter, `provenance` the facts that are saved with it.
    `bigrams` is the table of a one-pass drafter, see bigrams.py. `drafts` measures validations'
    accepted length, which is else simulated. `report` is silent in all processes but the first.
    """

    plan: recipe.Recipe
    drafter: Any  # a drafter module's Drafter
    num_training: int
    out: Path
    provenance: dict[str, Any]
    accelerator: Accelerator
    bigrams: Table | None = None
    report: Report = SILENT
    drafts: Drafts | None = None


@dataclass(frozen=True)
class MicroBatch:
    """Some sequences of a step, `indices`, which one process runs at a time.

    `number` is their place among the step's batches, `weight` their share of its answer tokens, 0
    where a process has fewer batches than the others and takes one of theirs. `is_last` says that
    it is this process's last of the step, whose batches have `step_answers` answer tokens in all.
    """

    indices: np.ndarray
    number: int
    weight: float
    is_last: bool
    step_answers: int


class Trainer:
    """Trains a drafter while its target is frozen, on sequences with stored features or, given
    `features`, on sequences of tokens: it takes token_BT i64 and returns the features [B, T, F].

    `JointTrainer` trains the target too; it replaces the methods under "what is trained".
    """

    def __init__(
        self,
        job: TrainingJob,
        sequences: batches.SequenceStore,
        features: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.job, self.sequences, self._features = job, sequences, features
        self.plan, self.settings, self.drafter = job.plan, job.plan.train, job.drafter
        self.out, self.accelerator, self.device = job.out, job.accelerator, job.accelerator.device
        self.drafter.shortlist_size = self.settings.shortlist
        trained = self.trained_module().to(self.device)
        optimizer = torch.optim.AdamW(
            self.parameter_groups(),
            lr=self.settings.lr,
            betas=self.settings.betas,
            weight_decay=self.settings.weight_decay,
            fused=True,
        )
        # `model` is the trained module as processes share it, with the same weights
        self.model, self.optimizer = self.accelerator.prepare(trained, optimizer)
        self.batches_per_step = self.settings.grad_accumulation * self.accelerator.num_processes
        self._epoch, self._order = 0, self.epoch_batches(0)
        self._batches_of_first_epoch = len(self._order)
        self.step = 0
        self.log = Log(
            self.settings,
            self.total_steps,
            self.has_held_out,
            self.accelerator,
            self.out,
            job.report,
        )
        self.average: WeightAverage | None = None
        if self.settings.ema:
            self.average = WeightAverage(self.saved_state(), self.settings.ema)

    @property
    def steps_per_epoch(self) -> int:
        return -(-self._batches_of_first_epoch // self.batches_per_step)

    @property
    def total_steps(self) -> int:
        return self.settings.total_steps(self.steps_per_epoch)

    # ---- what is trained -------------------------------------------------------------------------

    def trained_module(self) -> torch.nn.Module:
        """Returns the module whose forward pass makes a step: (batch, generator) -> (loss, counts).

        `counts` has correct_K and count_K, i64[K]: top-1 hits and labelled guesses of each guess.
        """
        return cast(torch.nn.Module, self.drafter)

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Returns the optimiser's groups, each with the `base_lr` that the schedule scales."""
        return [
            {"params": parameters, "base_lr": self.settings.lr * factor}
            for factor, parameters in self.drafter.trained_groups()
        ]

    def saved_state(self) -> torch.nn.Module:
        """Returns the module whose tensors a checkpoint holds."""
        return cast(torch.nn.Module, self.drafter)

    def start_step(self) -> None:
        """Prepares the optimiser step that is about to be made; does nothing here."""

    def with_features(self, batch: Batch) -> Batch:
        """Returns the batch with what the drafter reads of the target."""
        if self._features is None:
            return batch
        return replace(batch, feature_BTF=self._features(batch.token_BT))

    # ---- the loop --------------------------------------------------------------------------------

    def train(self) -> None:
        """Trains from `self.step` to the end; logs, validates and saves checkpoints on the way.

        Ctrl-C and SIGTERM, which come as KeyboardInterrupt and SystemExit, save a checkpoint first.
        Raises UserError, which names the last checkpoint, if the loss, a gradient or a weight is
        NaN or infinite.
        """
        settings, log, started = self.settings, self.log, time.monotonic()
        share = batches.padding_share(self.sequences.length_N, self.epoch_batches(0))
        self.job.report.line(f"batches: {share:.1%} padding")
        log.start_trackers(self.step, resume.flat(self.job.provenance["recipe"]))
        is_last = self.step == self.total_steps
        micro_batches, ahead = itertools.tee(self._coming())
        indices = (micro_batch.indices for micro_batch in ahead)
        loaded = batches.loaded(self.sequences, indices, self.device)
        coming = zip(micro_batches, loaded, strict=True)
        try:
            if self.step:
                self._report(is_last)  # unless the run was stopped after it had reported this step
            while not is_last:
                time_share = self.time_share(started)
                before = time.monotonic()
                self.start_step()

                results = []
                for micro_batch, batch in coming:
                    results.append(self._backward(micro_batch, self.with_features(batch)))
                    if micro_batch.is_last:
                        break

                factor = settings.lr_factor(self.step, self.total_steps, time_share)
                for group in self.optimizer.param_groups:
                    group["lr"] = group["base_lr"] * factor
                norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), settings.grad_clip)
                totals = self._totals(results, norm)
                with interruption.delayed():  # a checkpoint is of a whole step
                    self.optimizer.step()
                    self.optimizer.zero_grad(set_to_none=True)
                    if self.average is not None:
                        self.average.update(self.step)
                    self.step += 1
                    log.sums.add(*totals)
                log.rates = {"lr": settings.lr * factor, "gradient_norm": float(norm)}
                log.add_time(micro_batch.step_answers, time.monotonic() - before, time_share)

                is_last = self.step == self.total_steps or time_share >= 1
                self._report(is_last)
                if self.step % GIVE_BACK_EVERY == 0:
                    give_back_memory()
                if self.step % settings.checkpoint_every == 0 or is_last:
                    self._require_finite_weights()
                    self.save_checkpoint()
        except (KeyboardInterrupt, SystemExit):
            self._save_interrupted()
            raise
        finally:
            log.close()

    def _report(self, is_last: bool) -> None:
        """Logs and validates this step if it is due and the curve does not have it yet.

        Keeps the checkpoint of the best validation so far.
        """
        settings = self.settings
        known = {key for row in self.log.curve if row["step"] == self.step for key in row}
        is_due = self.step % settings.log_every == 0 or is_last
        if is_due and self.log.sums.steps and "loss" not in known:
            self.log.training(self.step, is_last)
        is_due = self.has_held_out and (self.step % settings.validate_every == 0 or is_last)
        if is_due and "accepted_length" not in known:
            self._require_finite_weights()
            before = time.monotonic()
            with self.averaged_weights():
                result = self.validate()
            self.log.pace.validation_seconds = time.monotonic() - before
            self.log.validation(self.step, result)
        best = self.log.best()
        is_best = is_due and best is not None and best["step"] == self.step
        # A run that was stopped in between has the row already and not the checkpoint.
        if is_best and not (self.out / BEST / folders.folder_name(self.step)).exists():
            self._save(BEST, keep=1)

    def _totals(
        self, results: Sequence[tuple[Tensor, dict[str, Tensor]]], gradient_norm: Tensor
    ) -> tuple[float, list[int], list[int]]:
        """Returns the step's loss, hits and labelled guesses of all processes; raises UserError
        unless loss and gradient are finite in all."""
        parts = [(loss[None], counts["correct_K"], counts["count_K"]) for loss, counts in results]
        sums = [torch.stack(part).sum(0).double() for part in zip(*parts, strict=True)]
        own = torch.cat((gradient_norm[None].double(), *sums))
        norm, loss, *counts = self.accelerator.reduce(own, "sum").tolist()
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise self._diverged(f"a loss of {loss:.4g} and gradients of norm {norm:.4g}")
        half = len(counts) // 2
        return loss, [*map(int, counts[:half])], [*map(int, counts[half:])]

    def _require_finite_weights(self) -> None:
        """Raises UserError unless all weights that are trained are finite."""
        trained = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        broken = checkpoint.non_finite(trained)
        if broken:
            raise self._diverged(f"NaN or infinity in {', '.join(broken[:3])}")

    def _diverged(self, found: str) -> UserError:
        """Returns the error of a run that has diverged."""
        newest = checkpoint.latest(self.out / CHECKPOINTS)
        kept = "no checkpoint was written yet"
        if newest is not None:
            kept = f"the last good checkpoint is {newest}"
        return UserError(
            f"training diverged after step {self.step}: got {found}, expected finite numbers; "
            f"{kept}; train into another --out with train.lr below {self.settings.lr:g}"
        )

    def time_share(self, started: float) -> float:
        """Returns the share of `max_minutes` that is over, the same in all processes.

        `started` is this process's `time.monotonic()`: a resumed run starts its time anew.
        """
        if self.settings.max_minutes is None:
            return 0.0
        share = (time.monotonic() - started) / (60 * self.settings.max_minutes)
        shares = self.accelerator.gather(torch.tensor([share], device=self.device))
        return float(shares.max())

    def epoch_batches(self, epoch: int) -> list[np.ndarray]:
        """Returns an epoch's batches of training sequences, as sequence indices."""
        length_N = self.sequences.length_N[: self.job.num_training]
        settings = self.settings
        return batches.epoch_batches(length_N, settings.batch_tokens, settings.seed, epoch)

    def _coming(self) -> Iterator[MicroBatch]:
        """Yields this process's batches from the present step on."""
        for step in range(self.step, self.total_steps):
            yield from self._micro_batches(step)

    def _micro_batches(self, step: int) -> list[MicroBatch]:
        """Returns this process's batches of a step; an epoch's last may have fewer than others."""
        epoch, within = divmod(step, self.steps_per_epoch)
        if self._epoch != epoch:
            self._epoch, self._order = epoch, self.epoch_batches(epoch)
        start = within * self.batches_per_step
        # the order may be a batch shorter or longer than epoch 0's; a process must never have none
        share = self._order[start : start + self.batches_per_step] or self._order[:1]
        # all have equally many, since each forward pass of a sharded target is one of all processes
        process, num_processes = self.accelerator.process_index, self.accelerator.num_processes
        mine = range(process, process + len(share), num_processes)
        answers = [int(self.sequences.answers_N[indices].sum()) for indices in share]
        all_answers = sum(answers)
        return [
            MicroBatch(
                indices=share[i % len(share)],
                number=i,
                weight=answers[i] / all_answers if i < len(share) else 0.0,
                is_last=i == mine[-1],
                step_answers=all_answers,
            )
            for i in mine
        ]

    def _backward(self, micro_batch: MicroBatch, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Adds the gradient of a batch's part of the step's loss, and returns this part and the
        counts of its guesses. Processes exchange their gradients at their last batch."""
        seed = self.settings.seed * 1_000_003 + self.step + 7_368_787 * micro_batch.number
        torch.manual_seed(seed)  # for dropout, which takes no generator
        is_last, weight = micro_batch.is_last, micro_batch.weight
        waits = contextlib.nullcontext() if is_last else self.accelerator.no_sync(self.model)
        with waits:
            with self._autocast():
                loss, counts = self.model(batch, torch.Generator().manual_seed(seed))
            # the exchange makes a mean of the processes' gradients, where a sum is meant
            self.accelerator.backward(loss * weight * self.accelerator.num_processes)
        return loss.detach() * weight, {k: v * (weight > 0) for k, v in counts.items()}

    def _autocast(self) -> torch.autocast:
        return torch.autocast(
            self.device.type, torch.bfloat16, enabled=self.settings.precision == "bf16"
        )

    # ---- validation and the curve ----------------------------------------------------------------

    @torch.no_grad()
    def validate(self) -> Validation:
        """Returns accuracy per guess and simulated accepted length on the held-out answers."""
        length_N = self.sequences.length_N
        held_out = held_out_sequences(self.job.num_training, length_N)
        groups = batches.by_length(held_out, length_N, self.settings.batch_tokens)
        held_out_batches = batches.loaded(self.sequences, groups, self.device)
        result = validate(map(self.with_features, held_out_batches), self._guesses)
        if self.job.drafts is None or not self.accelerator.is_main_process:
            return result
        asked = [self.sequences.sequence(int(i))[:2] for i in held_out[:QUESTIONS]]
        drafter = self._save_drafter(self.out / DRAFTING / "drafter")
        return replace(result, accepted_length=self.job.drafts(self.plan, drafter, asked))

    def _guesses(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor | None]:
        with self._autocast():
            ids, log_probs, pairs = self.drafter.guesses_with_pairs(
                batch, self.drafter.config.top_k
            )
        return ids, log_probs, pairs

    @property
    def has_held_out(self) -> bool:
        """Returns whether there are sequences to validate on."""
        return self.job.num_training < self.sequences.num_sequences

    def averaged_weights(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which the drafter has its averaged weights, if the run has some."""
        return contextlib.nullcontext() if self.average is None else self.average.in_use()

    # ---- files -----------------------------------------------------------------------------------

    def save_checkpoint(self) -> None:
        """Writes a checkpoint of this step and removes the oldest ones."""
        self._save(CHECKPOINTS, self.settings.keep_checkpoints)

    def _save(self, name: str, keep: int) -> None:
        """Writes a checkpoint of this step into the folder `name` of the run."""
        if not self.accelerator.is_main_process:
            return
        module = self.saved_state()
        tensors = [*module.state_dict().values()]
        for values in self.optimizer.state_dict()["state"].values():
            tensors += [value for value in values.values() if isinstance(value, Tensor)]
        average = None if self.average is None else self.average.tensors
        tensors += [*(average or {}).values()]
        size = disk.shown(sum(tensor.nbytes for tensor in tensors))
        with disk.writing(f"a checkpoint of {size}", self.out):
            checkpoint.save(
                self.out / name,
                self.step,
                module,
                self.optimizer,
                progress=asdict(
                    resume.RunState(
                        self.log.curve,
                        self.log.sums,
                        self.accelerator.num_processes,
                        self.batches_per_step,
                    )
                ),
                provenance=self.job.provenance,
                keep=keep,
                average=average,
            )

    def _save_interrupted(self) -> None:
        """Saves the last whole step of a run that is about to end, and says how to go on."""
        if not self.accelerator.is_main_process:
            return
        if not self.step:
            self.job.report.line("interrupted before the first step: there is nothing to save")
            return
        path = self.out / CHECKPOINTS / folders.folder_name(self.step)
        if checkpoint.latest(self.out / CHECKPOINTS) != path:
            if self.average is not None:
                self.average.put_back()
            self._require_finite_weights()
            self.save_checkpoint()
        self.job.report.line(
            f"interrupted: {path} holds step {self.step}; the same command with --resume goes on"
        )

    def resume(self, newest: Path) -> None:
        """Restores the run's newest checkpoint, whose folder `newest` is.

        Where the number of processes has changed, each step keeps its batches and their draws, but
        the run is not bit for bit what it would have been, and says so. Raises UserError if it
        belongs to a run with another recipe or more steps.
        """
        state = self._load(newest)
        changed = resume.changed_keys(state, self.job.provenance["recipe"])
        progress = resume.run_state(state)
        now = self.accelerator.num_processes
        was = progress.processes or now
        of_step = progress.batches_per_step or was * self.settings.grad_accumulation
        self.batches_per_step = of_step
        self.log.total_steps = self.total_steps
        if was != now:
            changed["processes"] = [was, now]
            self.job.report.line(
                f"{newest} was trained by {was} processes, now {now}: each step keeps its batches, "
                "but sums are rounded in another order"
            )
        resume.require_same_init(state, self.job.provenance.get("init"))
        if state.step > self.total_steps:
            raise UserError(
                f"{newest} has step {state.step}, the recipe ends at step {self.total_steps}: "
                "raise train.max_steps or train.epochs"
            )
        before = state.provenance.get("resumed", [])
        if changed:
            before = [*before, {"step": state.step, "changed": changed}]
        if before:
            self.job.provenance["resumed"] = before
        self.step, self.log.curve, self.log.sums = state.step, progress.curve, progress.log
        if self.accelerator.is_main_process:
            for path in (self.out / BEST).glob(f"{folders.STEP_PREFIX}*"):
                if path.name > folders.folder_name(self.step):  # made again from here on
                    remove_folder(path)

    def _load(self, path: Path) -> checkpoint.Checkpoint:
        """Restores weights, average and optimiser from a checkpoint."""
        average = None if self.average is None else self.average.tensors
        return checkpoint.load(path, self.saved_state(), self.optimizer, average)

    def export(self) -> Path:
        """Writes the drafter with its averaged weights, if it has some, and returns its folder."""
        with self.averaged_weights():
            return self.write_results()

    def write_results(self) -> Path:
        """Writes the present drafter into the folder of its curves, and returns its own folder."""
        folder = self.out / "drafter"
        if not self.accelerator.is_main_process:
            return folder
        self.log.write_curve()
        return self._save_drafter(folder)

    def _save_drafter(self, folder: Path) -> Path:
        """Writes the present drafter, with the newest validation that it has, and returns its
        folder."""
        validation = self.log.newest_validation(self.step)
        with disk.writing("the drafter", self.out):
            return checkpoint.save_drafter(
                folder,
                self.drafter.state_dict(),
                self.plan.drafter_name,
                self.drafter.config,
                self.job.provenance | {"steps": self.step, "validation": validation},
                self.drafter.draft_token_ids.cpu().numpy(),
                self.job.bigrams,
            )

    def restore_best(self) -> None:
        """Goes back to the step of the best validation, for `export`, and says which one that is.

        The last step stays where nothing is held out.
        """
        if not self.accelerator.is_main_process:
            return
        best, last = self.log.best(), self.step
        if best is None:
            self.job.report.line(f"exporting step {last}, the last: nothing is held out")
            return
        path = self.out / BEST / folders.folder_name(int(best["step"]))
        if best["step"] != last:
            if not path.is_dir():
                self.job.report.line(f"exporting step {last}, the last: {path} is not there")
                return
            self.step = self._load(path).step
        self.job.report.line(
            f"exporting step {self.step} of {last}, with the best validation: accepted length "
            f"{best['accepted_length']:.3f}"
        )
