"""Runs the training loop: AdamW over batches of sequences, validated with the tree in use.

A drafter is used through its `loss` and `guesses` alone. Each step's randomness comes from (seed,
step, process), so that a resumed run repeats an uninterrupted one. Under `accelerate launch` every
process takes its share of a step's batches.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from accelerate import Accelerator
from rich.console import Console
from torch import Tensor

from spec_export.drafters.layers import Batch
from spec_export.training import batches, checkpoint, curves, recipe
from spec_export.training.validate import (
    VALIDATION_BUDGET,
    Validation,
    held_out_sequences,
    validate,
)

console = Console(stderr=True)


@dataclass(frozen=True)
class TrainingJob:
    """The task that a trainer is given.

    The first `num_training` sequences train, the rest validates. `out` is the folder for
    checkpoints, curves and the drafter, `provenance` the facts that are saved with it.
    """

    plan: recipe.Recipe
    drafter: Any  # a drafter module's Drafter
    num_training: int
    out: Path
    provenance: dict[str, Any]
    accelerator: Accelerator


class Trainer:
    """Trains a drafter on sequences with stored features, while its target is frozen.

    `JointTrainer` trains the target too; it replaces the methods under "what is trained".
    """

    def __init__(self, job: TrainingJob, sequences: batches.SequenceStore) -> None:
        self.job, self.sequences = job, sequences
        self.plan, self.settings, self.drafter = job.plan, job.plan.train, job.drafter
        self.out, self.accelerator, self.device = job.out, job.accelerator, job.accelerator.device
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
        self.steps_per_epoch = -(-len(self._order) // self.batches_per_step)
        self.total_steps = self.settings.total_steps(self.steps_per_epoch)
        self.step = 0
        self.curve: curves.Curve = []
        self.sums = curves.TrainingSums()

    # ---- what is trained -------------------------------------------------------------------------

    def trained_module(self) -> torch.nn.Module:
        """Returns the module whose forward pass makes a step: (batch, generator) -> (loss, counts).

        `counts` has correct_K and count_K, i64[K]: top-1 hits and labelled guesses of each guess.
        """
        return cast(torch.nn.Module, self.drafter)

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Returns the optimiser's groups, each with the `base_lr` that the schedule scales."""
        parameters = [p for p in self.drafter.parameters() if p.requires_grad]
        return [{"params": parameters, "base_lr": self.settings.lr}]

    def saved_state(self) -> torch.nn.Module:
        """Returns the module whose tensors a checkpoint holds."""
        return cast(torch.nn.Module, self.drafter)

    def start_step(self) -> None:
        """Prepares the optimiser step that is about to be made; does nothing here."""

    def batch(self, indices: np.ndarray) -> Batch:
        """Returns the sequences `indices` as one batch, on this process's device."""
        return batches.padded(self.sequences, indices, self.device)

    # ---- the loop --------------------------------------------------------------------------------

    def train(self) -> None:
        """Trains from `self.step` to the end; logs, validates and saves checkpoints on the way."""
        share = batches.padding_share(self.sequences.length_N, self.epoch_batches(0))
        self.print_line(f"batches: {share:.1%} padding")
        settings, started, tokens = self.settings, time.monotonic(), 0
        is_last = self.step == self.total_steps
        while not is_last:
            time_share = self.time_share(started)
            tokens += self._optimizer_step(time_share)
            is_last = self.step == self.total_steps or time_share >= 1
            if self.step % settings.log_every == 0 or is_last:
                self._log_training(tokens / (time.monotonic() - started))
            has_held_out = self.job.num_training < self.sequences.num_sequences
            if has_held_out and (self.step % settings.validate_every == 0 or is_last):
                self._log_validation(self.validate())
            if self.step % settings.checkpoint_every == 0 or is_last:
                self.save_checkpoint()

    def _optimizer_step(self, time_share: float) -> int:
        """Makes one optimiser step and returns the answer tokens that it has learnt from."""
        tokens = 0
        self.start_step()
        micro_batches = self._micro_batches(self.step)
        for i, indices in enumerate(micro_batches, 1):
            micro = self.batch(indices)
            loss, counts = self._backward(micro, is_last=i == len(micro_batches))
            self.sums.add(loss, counts)
            tokens += int(micro.loss_BT.sum()) * self.accelerator.num_processes
        factor = self.settings.lr_factor(self.step, self.total_steps, time_share)
        for parameters in self.optimizer.param_groups:
            parameters["lr"] = parameters["base_lr"] * factor
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.grad_clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.sums.steps += 1
        return tokens

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

    def _micro_batches(self, step: int) -> list[np.ndarray]:
        """Returns this process's batches of a step, as sequence indices."""
        epoch, within = divmod(step, self.steps_per_epoch)
        if self._epoch != epoch:
            self._epoch, self._order = epoch, self.epoch_batches(epoch)
        start = within * self.batches_per_step
        # the order may be a batch shorter or longer than epoch 0's; a process must never have none
        share = self._order[start : start + self.batches_per_step] or self._order[:1]
        mine = share[self.accelerator.process_index :: self.accelerator.num_processes]
        return mine or share[:1]

    def _backward(self, batch: Batch, is_last: bool) -> tuple[float, dict[str, Tensor]]:
        """Adds the batch's gradient; processes exchange theirs at a step's last batch."""
        seed = self.settings.seed * 1_000_003 + self.step
        seed += 7_368_787 * self.accelerator.process_index
        waits = contextlib.nullcontext() if is_last else self.accelerator.no_sync(self.model)
        with waits:
            with self._autocast():
                loss, counts = self.model(batch, torch.Generator().manual_seed(seed))
            self.accelerator.backward(loss / self.settings.grad_accumulation)
        return loss.item() / self.settings.grad_accumulation, {
            k: v.cpu() for k, v in counts.items()
        }

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
        return validate((self.batch(indices) for indices in groups), self._guesses)

    def _guesses(self, batch: Batch) -> tuple[Tensor, Tensor]:
        with self._autocast():
            ids, log_probs = self.drafter.guesses(batch, self.drafter.config.top_k)
        return ids, log_probs

    def _log_training(self, tokens_per_second: float) -> None:
        """Adds a line to the curve from the sums of all processes, and prints it."""
        sums, num_guesses = self.sums, len(self.sums.correct_K)
        own = torch.tensor([sums.loss, *sums.correct_K, *sums.count_K], dtype=torch.float64)
        loss, *counts = self.accelerator.reduce(own.to(self.device), "sum").tolist()
        loss /= sums.steps * self.accelerator.num_processes
        accuracy = [
            hit / max(count, 1)
            for hit, count in zip(counts[:num_guesses], counts[num_guesses:], strict=True)
        ]
        row: dict[str, float] = {"step": self.step, "loss": loss}
        self.curve.append(row | {f"train_top1_{k}": a for k, a in enumerate(accuracy)})
        shown = " ".join(f"{a:.3f}" for a in accuracy)
        self.print_line(
            f"step {self.step}/{self.total_steps} loss {loss:.3f} top-1 {shown} "
            f"{tokens_per_second:.0f} tok/s"
        )
        self.sums = curves.TrainingSums()

    def _log_validation(self, result: Validation) -> None:
        """Adds a line to the curve, prints it, and writes the curve."""
        row: dict[str, float] = {"step": self.step, "accepted_length": result.accepted_length}
        row |= {f"top1_{k}": accuracy for k, accuracy in enumerate(result.top1_K)}
        row |= {f"top5_{k}": accuracy for k, accuracy in enumerate(result.top5_K)}
        self.curve.append(row)
        top1, top5 = (" ".join(f"{a:.3f}" for a in x) for x in (result.top1_K, result.top5_K))
        self.print_line(
            f"validation: top-1 {top1} | top-5 {top5} | accepted length "
            f"{result.accepted_length:.3f} ({VALIDATION_BUDGET.max_nodes} nodes)"
        )
        self._write_curve()

    def print_line(self, line: str) -> None:
        """Prints a line on the standard error, once for all processes."""
        if self.accelerator.is_main_process:
            console.print(line, soft_wrap=True)

    def _write_curve(self) -> None:
        if self.accelerator.is_main_process:
            curves.write(self.curve, self.out)

    # ---- files -----------------------------------------------------------------------------------

    def save_checkpoint(self) -> None:
        """Writes a checkpoint of this step and removes the oldest ones."""
        if not self.accelerator.is_main_process:
            return
        checkpoint.save(
            self.out / "checkpoints",
            self.step,
            self.saved_state(),
            self.optimizer,
            progress={"curve": self.curve, "log": asdict(self.sums)},
            provenance=self.job.provenance,
            keep=self.settings.keep_checkpoints,
        )

    def resume(self) -> None:
        """Restores the newest checkpoint, if there is one.

        Raises ValueError if it belongs to another recipe.
        """
        newest = checkpoint.latest(self.out / "checkpoints")
        if newest is None:
            return
        state = checkpoint.load(newest, self.saved_state(), self.optimizer)
        if state.provenance["recipe"] != self.job.provenance["recipe"]:
            raise ValueError(
                f"{newest} was trained with another recipe: name another --out, or the same recipe"
            )
        self.step, self.curve = state.step, state.progress["curve"]
        self.sums = curves.TrainingSums(**state.progress.get("log", {}))

    def export(self) -> Path:
        """Writes the drafter beside its curves and returns its folder."""
        folder = self.out / "drafter"
        if not self.accelerator.is_main_process:
            return folder
        self._write_curve()
        validated = [row for row in self.curve if "accepted_length" in row]
        facts = {"steps": self.step, "validation": validated[-1] if validated else None}
        return checkpoint.save_drafter(
            folder,
            self.drafter.state_dict(),
            self.plan.drafter_name,
            self.drafter.config,
            self.job.provenance | facts,
            self.drafter.draft_token_ids.cpu().numpy(),
        )
