"""Trains a drafter and a LoRA adapter on its target together.

    loss = backbone_weight · L_backbone + drafter_weight · L_drafter

L_backbone is the cross-entropy of the answer ("ce"), or KL(p_original ‖ p), where the original is
the same network with its adapter off ("distill", Medusa-2's self-distillation). The drafter reads
live features, so that its gradient reaches the target. The adapter is on every linear layer but
the LM head, which drafters share. The run leaves a merged target in a folder of its own, and the
drafter for it.

Medusa-2 is one choice of these settings, and takes two runs: only the heads, without this module,
then both, from the heads of the first run (`--init`). The adapter starts with the second run, so
that warm-up and schedule are whole for it.

`layer_dropout` is LayerSkip's: while the target trains, a sequence skips layer l (from 0) of L with
probability p_max · (2^(l/(L−1)) − 1), so that the later layers learn to do without it.

With FSDP the frozen weights of the target's layers are spread over the processes, since they take
most of the memory. The adapter and the drafter stay whole in each process.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from spec_export.drafters.layers import Batch
from spec_export.model import target as target_files
from spec_export.model.families import FAMILIES
from spec_export.model.hidden_states import features_and_taps
from spec_export.training import recipe
from spec_export.training.batches import TokenStore
from spec_export.training.data import Example
from spec_export.training.shards import shard
from spec_export.training.trainer import Trainer, TrainingJob
from spec_export.training.validate import Validation
from spec_runtime.errors import UserError
from spec_runtime.files.writing import replacing_folder, require_replaceable

MERGED = "the merged target of a run"
CHUNK_ROWS = 512  # rows whose [rows, V] logits exist at once


class JointModel(nn.Module):
    """The target with its adapter, and the drafter; the forward pass computes the joint loss."""

    target: Any  # a PeftModel around a transformers model
    drafter: Any

    def __init__(self, target: Any, drafter: Any, settings: recipe.JointSection) -> None:
        super().__init__()
        adapter = LoraConfig(
            r=settings.lora_rank,
            lora_alpha=settings.lora_alpha,
            lora_dropout=settings.lora_dropout,
            target_modules="all-linear",
        )
        self.target = get_peft_model(target, adapter)
        self.drafter = drafter
        self.settings = settings
        self.drafter_weight = settings.drafter_weight
        self._dropout_generator: torch.Generator | None = None  # None: no layer is skipped
        if settings.layer_dropout:
            layers = self.target.base_model.model.model.layers
            for i, layer in enumerate(layers):
                p = settings.layer_dropout * (2 ** (i / max(1, len(layers) - 1)) - 1)
                layer.register_forward_hook(partial(self._maybe_skip, p))
        self.train()

    def shard_target(self, device: torch.device) -> str:
        """Does what `shard` says for the target's layers."""
        said = shard(self.target, self.target.base_model.model.model.layers, device)
        shards = [n for n, p in self.named_parameters() if isinstance(p, DTensor)]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self, shards)
        return said

    def _maybe_skip(self, p: float, layer: Any, given: tuple[Tensor, ...], out: Tensor) -> Tensor:
        """Replaces a layer's output by its input for each sequence with probability p."""
        if self._dropout_generator is None:
            return out
        skips_B = torch.rand(len(out), generator=self._dropout_generator) < p
        return torch.where(skips_B.to(out.device)[:, None, None], given[0], out)

    def features(self, token_BT: Tensor) -> Tensor:
        """Returns the features [B, T, F] of right-padded sequences, token_BT i64.

        They are the final hidden state, then the drafter's taps.
        """
        body = self.target.base_model.model.model
        return torch.cat(features_and_taps(body, token_BT, self.drafter.config.taps), dim=-1)

    def forward(
        self, batch: Batch, generator: torch.Generator | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the joint loss, f32 scalar, and the drafter's counts."""
        self._dropout_generator = generator
        feature = self.features(batch.token_BT)
        self._dropout_generator = None
        loss, counts = self.drafter(replace(batch, feature_BTF=feature), generator)
        backbone = self.backbone_loss(batch, feature[..., : self.drafter.dims.hidden_size])
        return self.settings.backbone_weight * backbone + self.drafter_weight * loss, counts

    def backbone_loss(self, batch: Batch, hidden: Tensor) -> Tensor:
        """Returns L_backbone, f32 scalar: a mean over answer tokens, row t predicting token t + 1.

        `hidden` [B, T, D] is the target's final hidden state, with a gradient.
        """
        is_row = batch.loss_BT[:, 1:]
        label_R = batch.token_BT[:, 1:][is_row]
        row_RD = hidden[:, :-1][is_row]
        original_RD = row_RD.detach()
        if self.settings.backbone_loss == "distill":
            with torch.no_grad(), self.target.disable_adapter():
                original_RD = self.features(batch.token_BT)[:, :-1, : hidden.shape[-1]][is_row]
        head, total = self.target.base_model.model.lm_head, hidden.new_zeros(())
        parts = (x.split(CHUNK_ROWS) for x in (row_RD, original_RD, label_R))
        for row, original, label in zip(*parts, strict=True):
            total = total + torch.utils.checkpoint.checkpoint(  # no [R, V] logits are kept
                self._chunk_loss, head, row, original, label, use_reentrant=False
            )
        return total / max(1, len(label_R))

    def _chunk_loss(self, head: Any, row: Tensor, original: Tensor, label: Tensor) -> Tensor:
        """Returns the summed loss of rows [R, D]: cross-entropy, or KL(p_original ‖ p)."""
        config = self.target.base_model.model.config
        family = FAMILIES[config.model_type]
        logits = family.logits(config, head(row).float())
        if self.settings.backbone_loss == "ce":
            return nn.functional.cross_entropy(logits, label, reduction="sum")
        with torch.no_grad():
            log_p_original = family.logits(config, head(original).float()).log_softmax(-1)
        log_p = logits.log_softmax(-1)
        return nn.functional.kl_div(log_p, log_p_original, log_target=True, reduction="sum")


class JointTrainer(Trainer):
    """Trains drafter and adapter on live features, each at a learning rate of its own.

    One schedule and its warm-up scale both rates.
    """

    def __init__(
        self,
        job: TrainingJob,
        target: Any,
        tokenizer: Any,
        examples: Sequence[Example],
        shards_target: bool = False,
    ) -> None:
        """`shards_target`: spreads the target over the processes, if there are several of them;
        see `JointModel.shard_target`. Raises UserError if the merged target could not be written
        at the end."""
        assert job.plan.joint is not None
        require_replaceable(job.out / "target", target_files.files_of_model, MERGED)
        self.joint, self.tokenizer = job.plan.joint, tokenizer
        self.joint_model = JointModel(target, job.drafter, self.joint)
        self.is_sharded = shards_target and job.accelerator.num_processes > 1
        if self.is_sharded:
            job.report.line(self.joint_model.shard_target(job.accelerator.device))
        super().__init__(job, TokenStore(examples))

    def trained_module(self) -> nn.Module:
        return self.joint_model

    def parameter_groups(self) -> list[dict[str, Any]]:
        adapter = [p for p in self.joint_model.target.parameters() if p.requires_grad]
        return [*super().parameter_groups(), {"params": adapter, "base_lr": self.joint.backbone_lr}]

    def start_step(self) -> None:
        """Sets this step's weights.

        Medusa-2 in one stage raises the drafter's weight as the first quarter of a sine wave:
        weight · sin(π/2 · (step + 1) / steps). A drafter with a curriculum of its own reads
        `optimizer_step`.
        """
        self.drafter.optimizer_step = self.step
        if self.joint.drafter_ramp == "sine":
            progress = min(1.0, (self.step + 1) / self.total_steps)
            ramp = math.sin(math.pi / 2 * progress)
            self.joint_model.drafter_weight = self.joint.drafter_weight * ramp

    def with_features(self, batch: Batch) -> Batch:
        """Returns the batch, for validation with the target's features as they are now.

        A training step computes its own features, with a gradient, in `JointModel.forward`.
        """
        if torch.is_grad_enabled():
            return batch
        return replace(batch, feature_BTF=self.joint_model.features(batch.token_BT))

    @torch.no_grad()
    def validate(self) -> Validation:
        """Returns what `Trainer.validate` does, with the adapter's dropout off."""
        self.joint_model.eval()
        try:
            return super().validate()
        finally:
            self.joint_model.train()

    def saved_state(self) -> nn.Module:
        """Returns the trained part: drafter and adapter, not the frozen target."""
        part = nn.Module()
        part.drafter = self.drafter
        adapter = (p for p in self.joint_model.target.parameters() if p.requires_grad)
        part.adapter = nn.ParameterList(adapter)
        return part

    def write_results(self) -> Path:
        """Writes the merged target into `target/`, and next to it the drafter, which names it.

        The drafter is written even if the target cannot be. Returns the drafter's folder. Raises
        UserError if the target cannot be written.
        """
        try:
            if self.accelerator.is_main_process:
                self._save_merged_target()
        finally:
            folder = super().write_results()
        return folder

    def _save_merged_target(self) -> None:
        """Writes the merged target; the drafter's provenance then says which it was trained for."""
        folder = self.out / "target"
        merged = self._whole_target().merge_and_unload()
        try:
            with replacing_folder(folder, target_files.files_of_model, MERGED) as temporary:
                target_files.save(merged, self.tokenizer, temporary)
        except (OSError, SafetensorError) as error:
            raise UserError(
                f"could not write the merged target {folder}: {error}; nothing is lost: make room "
                "for it, then run again with --resume"
            ) from error
        source = target_files.resolve(str(folder))
        self.job.provenance["target_fingerprint"] = target_files.fingerprint(source)

    def _whole_target(self) -> Any:
        """Returns the target with its adapter; a sharded one is loaded again to be whole."""
        if not self.is_sharded:
            return self.joint_model.target
        again, _ = target_files.load(target_files.resolve(self.plan.model))
        whole = JointModel(again, self.drafter, self.joint).target
        trained = [
            [p for p in x.parameters() if p.requires_grad] for x in (whole, self.joint_model.target)
        ]
        with torch.no_grad():
            for to, source in zip(*trained, strict=True):
                to.copy_(source)
        return whole
