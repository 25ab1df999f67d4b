"""Train a drafter from a recipe: features once, then AdamW over batches of sequences, validated
with the tree in use.

Knows recipes, the feature cache, checkpoints and optimisers. Knows no drafter: it calls `loss` and
`guesses`. Each step's randomness comes from (seed, step, process), so that a resumed run repeats an
uninterrupted one. Under `accelerate launch` every process takes its share of a step's batches; with
`--use_fsdp` also of the target, where that trains along (joint.py).

Sequences are not packed: each batch holds sequences of about one length, whose padding is printed
and small. So no sequence sees another, and a drafter's attention needs no mask between them.
"""

from __future__ import annotations

import contextlib
import csv
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.utils import parse_flag_from_env
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from spec_export import drafters, target
from spec_export.decoder import Backbone
from spec_export.drafters.layers import Batch
from spec_export.training import checkpoint, data, features, recipe
from spec_export.training.allocator import keep_big_blocks
from spec_runtime.trees.budget import Budget
from spec_runtime.trees.grow import grow
from spec_runtime.trees.tree import TokenTree

console = Console(stderr=True)
VALIDATION_BUDGET = Budget(max_nodes=16)
VALIDATION_TOKENS = 40_000  # a bound on the time one validation takes


class SequenceStore(Protocol):
    """What the loop reads sequences from; `features.FeatureCache` is one."""

    @property
    def num_sequences(self) -> int: ...

    @property
    def length_N(self) -> np.ndarray: ...

    def sequence(self, i: int) -> tuple[Tensor, Tensor, Tensor]: ...


@dataclass
class Log:
    """Sums since the last line of the training curve; a checkpoint keeps them too."""

    loss: float = 0.0
    steps: int = 0
    correct_K: list[int] = field(default_factory=list)
    count_K: list[int] = field(default_factory=list)

    def add(self, loss: float, counts: dict[str, Tensor]) -> None:
        self.loss += loss
        for name in ("correct_K", "count_K"):
            new = counts[name].tolist()
            old = getattr(self, name) or [0] * len(new)
            setattr(self, name, [a + b for a, b in zip(old, new, strict=True)])


@dataclass(frozen=True)
class Validation:
    """Top-1 and top-5 accuracy per guess (k = 0 is the token after the root); accepted length with
    the tree in use."""

    top1_K: tuple[float, ...]
    top5_K: tuple[float, ...]
    accepted_length: float


def run(
    recipe_path: Path,
    overrides: list[str] | None = None,
    out: Path | None = None,
    resume: bool = False,
    cache: Path | None = None,
    init: Path | None = None,
) -> Path:
    """Train as the recipe says and return the folder of the drafter (`drafter.safetensors`,
    `config.json`); its curves lie beside it.

    out: where checkpoints and the drafter go (runs/<recipe's stem> by default); cache: the feature
    cache (out/features); init: a drafter of the same shape to start from.
    ValueError: bad recipe, data or checkpoint; `out` already holding a run without `resume`.
    """
    keep_big_blocks()
    plan = recipe.load(recipe_path, overrides or [])
    out = out or Path("runs") / recipe_path.stem
    checkpoints = out / "checkpoints"
    if checkpoint.latest(checkpoints) is not None and not resume:
        raise ValueError(
            f"{out} already holds a training run: pass --resume to go on, or another --out"
        )
    module = drafters.load(plan.drafter_name)
    config = recipe.build_config(module.Config, plan.drafter_fields, f"{recipe_path} [drafter]")

    source = target.resolve(plan.model)
    model, tokenizer = target.load(source)
    examples = data.read(plan.data_paths, tokenizer, plan.data.max_length, plan.data.sources)
    training, held_out = data.split(examples, plan.data.validation_fraction)
    taps = tuple(config.taps)
    backbone = Backbone.from_transformers(model, taps)  # refuses taps that the target lacks
    draft_token_ids = None
    if plan.export.draft_vocab:
        always = tokenizer.all_special_ids
        chosen = data.most_frequent_tokens(
            training, plan.export.draft_vocab, backbone.config.vocab_size, always
        )
        draft_token_ids = torch.from_numpy(chosen)
    torch.manual_seed(plan.train.seed)
    drafter = module.Drafter(config, target.ends(backbone), draft_token_ids)
    if init is not None:
        checkpoint.load_drafter(init).load_into(drafter)
    ordered = training + held_out
    about = checkpoint.collect_provenance(
        recipe=plan.as_dict(), target=source.name, sources=data.source_counts(examples)
    )
    # accelerate's own FSDP would cut up the drafter, which is small and used outside of `forward`
    wants_shards = parse_flag_from_env("ACCELERATE_USE_FSDP")
    os.environ.pop("ACCELERATE_USE_FSDP", None)
    rests = plan.joint is not None and plan.joint.drafter_only_steps > 0
    exchange = DistributedDataParallelKwargs(broadcast_buffers=False, find_unused_parameters=rests)
    accelerator = Accelerator(kwargs_handlers=[exchange])
    del backbone
    trainer: Trainer
    if plan.joint is None:
        folder = cache or out / "features"
        if accelerator.is_main_process:
            model = model.to(accelerator.device, torch.bfloat16)
            _build_features(folder, training, held_out, model, source.name, taps)
        accelerator.wait_for_everyone()
        if wants_shards and accelerator.is_main_process:
            console.print("FSDP: nothing to shard, a frozen target is not there in training")
        stored = features.FeatureCache(folder, taps)
        del model
        trainer = Trainer(plan, drafter, stored, len(training), out, about, accelerator)
    else:
        from spec_export.training import joint  # here: it imports this file

        about["target_modified"] = True
        trainer = joint.JointTrainer(
            plan,
            model,
            tokenizer,
            drafter,
            ordered,
            len(training),
            out,
            about,
            accelerator,
            shards_target=wants_shards,
        )
    if resume:
        trainer.resume()
    trainer.train()
    return trainer.export()


def _build_features(
    folder: Path,
    training: list[data.Example],
    held_out: list[data.Example],
    model: Any,
    name: str,
    taps: tuple[int, ...],
) -> None:
    ordered = training + held_out
    size = features.size_estimate(ordered, model.config.hidden_size * (1 + len(taps)))
    console.print(
        f"{len(training)} sequences to train on, {len(held_out)} held out; "
        f"features take {size / 1e9:.1f} GB"
    )
    with Progress(console=console) as progress:
        bar = progress.add_task("features")
        features.build(
            folder,
            ordered,
            model,
            name,
            taps,
            lambda done, total: progress.update(bar, completed=done, total=total),
        )


class Trainer:
    """The training loop over a feature cache whose first `num_training` sequences train and whose
    rest validates."""

    def __init__(
        self,
        plan: recipe.Recipe,
        drafter: Any,
        cache: SequenceStore,
        num_training: int,
        out: Path,
        about: dict[str, Any],
        accelerator: Accelerator,
    ) -> None:
        self.plan, self.settings, self.drafter, self.cache = plan, plan.train, drafter, cache
        self.num_training, self.out, self.about = num_training, out, about
        self.accelerator = accelerator
        self.device = accelerator.device
        trained = self.trained_module().to(self.device)
        optimizer = torch.optim.AdamW(
            self.parameter_groups(),
            lr=self.settings.lr,
            betas=self.settings.betas,
            weight_decay=self.settings.weight_decay,
            fused=True,
        )
        # `model` is the trained module as processes share it, with the same weights
        self.model, self.optimizer = accelerator.prepare(trained, optimizer)
        self.batches_per_step = self.settings.grad_accumulation * accelerator.num_processes
        self.steps_per_epoch = -(-len(self._epoch_batches(0)) // self.batches_per_step)
        self.total_steps = self.settings.total_steps(self.steps_per_epoch)
        self.step = 0
        self.curve: list[dict[str, float]] = []
        self.log = Log()

    # ---- what joint training replaces ----

    def trained_module(self) -> torch.nn.Module:
        """What a step's forward pass runs: (batch, generator) -> (loss, counts)."""
        return cast(torch.nn.Module, self.drafter)

    def parameter_groups(self) -> list[dict[str, Any]]:
        """The optimiser's groups, each with the `base_lr` that the schedule scales."""
        parameters = [p for p in self.drafter.parameters() if p.requires_grad]
        return [{"params": parameters, "base_lr": self.settings.lr}]

    def saved_state(self) -> torch.nn.Module:
        """The module whose tensors a checkpoint holds."""
        return cast(torch.nn.Module, self.drafter)

    def start_step(self) -> None:
        """Before each optimiser step."""

    # ---- batches ---------------------------------------------------------------------------------

    def _epoch_batches(self, epoch: int) -> list[np.ndarray]:
        """Sequence indices of each batch: shuffled, but of similar length so that little is
        padding."""
        rng = np.random.default_rng((self.settings.seed, epoch))
        order = rng.permutation(self.num_training)
        batches: list[np.ndarray] = []
        for pool in np.array_split(order, max(1, len(order) // 512)):
            batches += self._by_length(pool)
        return [batches[i] for i in rng.permutation(len(batches))]

    def _by_length(self, pool: np.ndarray) -> list[np.ndarray]:
        length_N = self.cache.length_N
        batches: list[np.ndarray] = []
        group: list[int] = []
        for i in pool[np.argsort(length_N[pool], kind="stable")]:
            if group and (len(group) + 1) * length_N[i] > self.settings.batch_tokens:
                batches.append(np.array(group))
                group = []
            group.append(i)
        batches.append(np.array(group))
        return batches

    def batch(self, indices: np.ndarray) -> Batch:
        rows = [self.cache.sequence(int(i)) for i in indices]
        pad = torch.nn.utils.rnn.pad_sequence
        token, loss, feature = (
            pad([row[part] for row in rows], batch_first=True) for part in range(3)
        )
        length = torch.tensor([len(row[0]) for row in rows])
        return Batch(*(x.to(self.device) for x in (token, loss, feature, length)))

    # ---- the loop --------------------------------------------------------------------------------

    def train(self) -> None:
        """From `self.step` to the end: log, validate, checkpoint."""
        share = padding_share(self.cache.length_N, self._epoch_batches(0))
        self._print(f"batches: {share:.1%} padding")
        settings, started, tokens = self.settings, time.monotonic(), 0
        last = self.step == self.total_steps
        while not last:
            time_share = self._time_share(started)
            self.start_step()
            micro_batches = self._micro_batches(self.step)
            for i, indices in enumerate(micro_batches, 1):
                micro = self.batch(indices)
                loss, counts = self._backward(micro, is_last=i == len(micro_batches))
                self.log.add(loss, counts)
                tokens += int(micro.loss_BT.sum()) * self.accelerator.num_processes
            factor = settings.lr_factor(self.step, self.total_steps, time_share)
            for parameters in self.optimizer.param_groups:
                parameters["lr"] = parameters["base_lr"] * factor
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), settings.grad_clip)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            self.step += 1
            self.log.steps += 1
            last = self.step == self.total_steps or time_share >= 1
            if self.step % settings.log_every == 0 or last:
                self._record_training(tokens / (time.monotonic() - started))
            if (
                self.step % settings.validate_every == 0 or last
            ) and self.num_training < self.cache.num_sequences:
                self._record(self.validate())
            if self.step % settings.checkpoint_every == 0 or last:
                self._save()

    def _time_share(self, started: float) -> float:
        """How much of `max_minutes` is over, the same in all processes; this process's start counts
        anew after a resumption."""
        if self.settings.max_minutes is None:
            return 0.0
        share = (time.monotonic() - started) / (60 * self.settings.max_minutes)
        shares = self.accelerator.gather(torch.tensor([share], device=self.device))
        return float(shares.max())

    def _record_training(self, rate: float) -> None:
        """One line of the curve from all processes' sums."""
        log, num_guesses = self.log, len(self.log.correct_K)
        sums = torch.tensor([log.loss, *log.correct_K, *log.count_K], dtype=torch.float64)
        loss, *counts = self.accelerator.reduce(sums.to(self.device), "sum").tolist()
        loss /= log.steps * self.accelerator.num_processes
        accuracy = [
            hit / max(count, 1)
            for hit, count in zip(counts[:num_guesses], counts[num_guesses:], strict=True)
        ]
        row: dict[str, float] = {"step": self.step, "loss": loss}
        self.curve.append(row | {f"train_top1_{k}": a for k, a in enumerate(accuracy)})
        shown = " ".join(f"{a:.3f}" for a in accuracy)
        self._print(
            f"step {self.step}/{self.total_steps} loss {loss:.3f} top-1 {shown} {rate:.0f} tok/s"
        )
        self.log = Log()

    def _print(self, line: str) -> None:
        if self.accelerator.is_main_process:
            console.print(line)

    def _micro_batches(self, step: int) -> list[np.ndarray]:
        """This process's batches of a step, as sequence indices."""
        epoch, within = divmod(step, self.steps_per_epoch)
        if getattr(self, "_epoch", None) != epoch:
            self._epoch, self._order = epoch, self._epoch_batches(epoch)
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

    # ---- validation ------------------------------------------------------------------------------

    @torch.no_grad()
    def validate(self) -> Validation:
        """Accuracy per guess over the held-out answers, and the accepted length of simulated
        drafting on them."""
        pool = np.arange(self.num_training, self.cache.num_sequences)
        pool = pool[
            : max(1, int(np.searchsorted(np.cumsum(self.cache.length_N[pool]), VALIDATION_TOKENS)))
        ]
        hits_K: Any = 0
        top5_K: Any = 0
        count_K: Any = 0
        committed = steps = 0
        for indices in self._by_length(pool):
            batch = self.batch(indices)
            with self._autocast():
                ids, log_probs = (
                    x.cpu().numpy() for x in self.drafter.guesses(batch, self.drafter.config.top_k)
                )
            for row, i in enumerate(indices):
                token, loss, _ = self.cache.sequence(int(i))
                hit, hit5, count = guess_accuracy(token.numpy(), loss.numpy(), ids[row])
                hits_K, top5_K, count_K = hits_K + hit, top5_K + hit5, count_K + count
                a, b = simulate(
                    token.numpy(), loss.numpy(), ids[row], log_probs[row], VALIDATION_BUDGET
                )
                committed, steps = committed + a, steps + b
        count_K = np.maximum(count_K, 1)
        return Validation(
            tuple(hits_K / count_K), tuple(top5_K / count_K), committed / max(steps, 1)
        )

    def _record(self, result: Validation) -> None:
        row: dict[str, float] = {"step": self.step, "accepted_length": result.accepted_length}
        row |= {f"top1_{k}": v for k, v in enumerate(result.top1_K)} | {
            f"top5_{k}": v for k, v in enumerate(result.top5_K)
        }
        self.curve.append(row)
        top1, top5 = (" ".join(f"{a:.3f}" for a in x) for x in (result.top1_K, result.top5_K))
        nodes = VALIDATION_BUDGET.max_nodes
        self._print(
            f"validation: top-1 {top1} | top-5 {top5} | accepted length "
            f"{result.accepted_length:.3f} ({nodes} nodes)"
        )
        self._write_curves()

    def _write_curves(self) -> None:
        if not self.accelerator.is_main_process:
            return
        self.out.mkdir(parents=True, exist_ok=True)
        keys = sorted({key for row in self.curve for key in row}, key=lambda k: (k != "step", k))
        with (self.out / "curves.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, keys)
            writer.writeheader()
            writer.writerows(self.curve)
        plot_curves(self.curve, self.out / "curves.png")

    # ---- files -----------------------------------------------------------------------------------

    def _save(self) -> None:
        if not self.accelerator.is_main_process:
            return
        checkpoint.save(
            self.out / "checkpoints",
            self.step,
            self.saved_state(),
            self.optimizer,
            progress={"curve": self.curve, "log": asdict(self.log)},
            provenance=self.about,
            keep=self.settings.keep_checkpoints,
        )

    def resume(self) -> None:
        """Go on from the newest checkpoint, if there is one. ValueError: it belongs to another
        recipe."""
        newest = checkpoint.latest(self.out / "checkpoints")
        if newest is None:
            return
        state = checkpoint.load(newest, self.saved_state(), self.optimizer)
        if state.provenance["recipe"] != self.about["recipe"]:
            raise ValueError(
                f"{newest} was trained with another recipe: name another --out, or the same recipe"
            )
        self.step, self.curve = state.step, state.progress["curve"]
        self.log = Log(**state.progress.get("log", {}))

    def export(self) -> Path:
        """Write the drafter itself next to its curves and return its folder."""
        folder = self.out / "drafter"
        if not self.accelerator.is_main_process:
            return folder
        self._write_curves()
        validated = [row for row in self.curve if "accepted_length" in row]
        about = self.about | {
            "steps": self.step,
            "validation": validated[-1] if validated else None,
        }
        return checkpoint.save_drafter(
            folder,
            self.drafter.state_dict(),
            self.plan.drafter_name,
            self.drafter.config,
            about,
            self.drafter.draft_token_ids.cpu().numpy(),
        )


def padding_share(length_N: np.ndarray, batches: Sequence[np.ndarray]) -> float:
    """How much of the batches' positions is padding: `batches` are indices of sequences, padded to
    their batch's longest. Lengths 2, 4, 4 as [0, 1] and [2]: 2 of 12 positions."""
    positions = sum(len(batch) * int(length_N[batch].max()) for batch in batches)
    return 1 - sum(int(length_N[batch].sum()) for batch in batches) / positions


def guess_accuracy(
    token_T: np.ndarray, loss_T: np.ndarray, ids_RKC: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Top-1 hits, top-5 hits and number of labelled guesses, each i64[K], of one sequence.

    Guess k at row t is about token t+2+k; only answer tokens count.
    """
    R, K, _ = ids_RKC.shape
    hit, hit5, count = (np.zeros(K, dtype=np.int64) for _ in range(3))
    for k in range(K):
        rows = np.arange(min(R, len(token_T) - 2 - k)) if len(token_T) > 2 + k else np.arange(0)
        rows = rows[loss_T[rows + 2 + k] & loss_T[rows + 2]]
        match = ids_RKC[rows, k, :5] == token_T[rows + 2 + k, None]
        hit[k], hit5[k], count[k] = match[:, 0].sum(), match.any(1).sum(), len(rows)
    return hit, hit5, count


def simulate(
    token_T: np.ndarray,
    loss_T: np.ndarray,
    ids_RKC: np.ndarray,
    log_prob_RKC: np.ndarray,
    budget: Budget,
) -> tuple[int, int]:
    """(committed tokens, verify steps) of drafting along a known greedy answer, as the runtime
    would.

    The first answer token comes from prefill; each step commits the tree's path along the answer,
    and the bonus.
    """
    answer = np.flatnonzero(loss_T)
    # position: index of the root token, which has a token before it
    position, end = max(int(answer[0]), 1), int(answer[-1])
    committed = steps = 0
    while position < end:
        t = position - 1  # the pair (feature t, token t+1 = root)
        tree = grow(int(token_T[position]), ids_RKC[t], log_prob_RKC[t], budget)
        accepted = _walk(tree, token_T[position + 1 : end + 1])
        advance = min(accepted + 1, end - position)
        committed, steps, position = committed + advance, steps + 1, position + advance
    return committed, steps


def _walk(tree: TokenTree, truth_T: np.ndarray) -> int:
    node = accepted = 0
    for token in truth_T:
        child = tree.child(node, int(token))
        if child is None:
            break
        node, accepted = child, accepted + 1
    return accepted


def plot_curves(curve: list[dict[str, float]], path: Path) -> None:
    """Loss, accuracy per guess and simulated accepted length over steps, as one PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 4, figsize=(20, 4))
    trained = [row for row in curve if "loss" in row]
    validated = [row for row in curve if "accepted_length" in row]
    steps = [row["step"] for row in validated]
    axes[0].plot([row["step"] for row in trained], [row["loss"] for row in trained])
    axes[0].set(title="training loss", xlabel="step")
    for axis, rank in zip(axes[1:3], ("top1", "top5"), strict=True):
        for key in sorted({key for row in validated for key in row if key.startswith(f"{rank}_")}):
            axis.plot(steps, [row[key] for row in validated], label=f"guess {key[5:]}")
        axis.set(title=f"validation {rank.replace('p', 'p-')} accuracy", xlabel="step")
    if validated:
        axes[1].legend()
    axes[3].plot(steps, [row["accepted_length"] for row in validated])
    axes[3].set(
        title=f"simulated accepted length, {VALIDATION_BUDGET.max_nodes} nodes", xlabel="step"
    )
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
