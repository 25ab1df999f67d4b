"""Foretells disk, memory and hours of a training run before it runs, each with its arithmetic.

Counts the weights of outlines without memory. These are estimates: what a run takes is said by
`needs` when it begins, and by its log.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch

from spec_export import drafters
from spec_export.model import checkpoint
from spec_export.model.config import DecoderConfig
from spec_export.model.ends import LayerDims, TargetEnds
from spec_export.training import disk, needs, recipe
from spec_export.training.precision import fast_precision, seconds
from spec_runtime.bundle.memory import available_bytes

REACHED = 0.5  # of the speed of one large product, by whole passes
DECODED = 0.5  # of the speed of a pass, by answers that come a token at a time, many side by side


@dataclass(frozen=True)
class Machine:
    """What a run works on: so many GPUs of one kind, 0 for this processor, with the operations a
    second that one of them reaches and its bytes of memory."""

    name: str
    gpus: int
    flops: float
    memory: int


def machine(gpus: int) -> Machine:
    """Returns this machine's processor, `gpus` of its GPUs, or that many H100 where it has none: of
    989 TFLOP/s in bf16 four tenths."""
    if gpus and not torch.cuda.is_available():
        return Machine("H100 (assumed)", gpus, 400e12, 80_000_000_000)
    device, n = ("cuda", 8192) if gpus else ("cpu", 256)
    dtype = torch.bfloat16 if gpus or fast_precision() == "bf16" else torch.float32
    flops = REACHED * 2 * n**3 / seconds(dtype, n, device)
    if not gpus:
        return Machine("this processor", 0, flops, available_bytes())
    about = torch.cuda.get_device_properties(0)
    return Machine(about.name, gpus, flops, about.total_memory)


@dataclass(frozen=True)
class Sizes:
    """What estimates read of a target, whose weights are counted, and of an untrained drafter for
    it, whose tensors have no memory."""

    shape: DecoderConfig
    target: int
    config: Any
    drafter: Any

    @property
    def trained(self) -> int:
        return sum(parameter.numel() for parameter in self.drafter.parameters())

    @property
    def width(self) -> int:
        """Returns the bytes of a token's stored features, see features.py."""
        return 2 * self.shape.hidden_size * (1 + len(self.config.taps)) + 5

    def memory(self, batch_tokens: int, holds_target: bool) -> int:
        """Returns the bytes of a process with micro-batches of so many tokens, and perhaps the
        target in bf16."""
        held = 2 * self.target * holds_target
        return needs.LIBRARIES + needs.of_steps(self.drafter, self.trained, batch_tokens, held)

    def flops(self, shortlist: int) -> float:
        """Returns the drafter's operations for a token in a training step, attention aside: 6 for
        each trained weight and row, and 4 for each weight of the frozen head and guess."""
        masks = getattr(self.config, "num_masks", getattr(self.config, "block_size", 1) - 1)
        rows = getattr(self.config, "ttt_steps", 1)
        rows += masks * getattr(self.config, "anchor_fraction", 1.0)
        guesses = rows if rows > 1 else self.drafter.runtime_config()["num_guesses"]
        Vd, D = self.drafter.head_VD.shape
        frozen = 0 if self.drafter.trains_output_head else min(shortlist or Vd, Vd) * D
        return float(6 * self.trained * rows + 4 * frozen * guesses)


def sizes(plan: recipe.Recipe, raw: Any, shape: DecoderConfig) -> Sizes:
    """Returns the sizes for a recipe and a target of the transformers config `raw`, of which
    `shape` was read."""
    module = drafters.load(plan.drafter_name)
    config = recipe.build_config(module.Config, plan.drafter_fields, "[drafter]")
    V, D, Vd = shape.vocab_size, shape.hidden_size, plan.export.draft_vocab
    heads = shape.num_heads, shape.num_kv_heads, shape.head_dim
    with torch.device("meta"):
        embed_VD, turns = torch.empty(V, D), torch.empty(shape.rows, shape.rotary_dim // 2)
        head_VD = embed_VD if raw.tie_word_embeddings else torch.empty(V, D)
        dims = LayerDims(D, shape.intermediate_size, *heads, shape.norm_eps)
        norm_D = torch.ones(D, device="cpu")  # whose scale is read
        ends = TargetEnds(dims, embed_VD, head_VD, norm_D, turns, turns, {})
        drafter = module.Drafter(config, ends, None if Vd is None else torch.arange(Vd))
    return Sizes(shape, checkpoint.outline(raw).num_parameters(), config, drafter)


def of_run(
    plan: recipe.Recipe, found: Sizes, machine: Machine, tokens: int, answers: int
) -> list[tuple[str, str, str]]:
    """Returns what a run of the recipe takes: of each thing its name, how much, and how that was
    reckoned.

    tokens: of all rows of the data. answers: those of them that the target writes.
    """
    D, train, is_stored = found.shape.hidden_size, plan.train, plan.data.store_features
    number = max(1, machine.gpus)
    batch = train.batch_tokens * train.grad_accumulation * number
    seen = train.total_steps(math.ceil(tokens / batch)) * batch
    target, drafter = 2 * found.target, found.flops(train.shortlist)
    a_token = drafter + (0 if is_stored else target)
    weights, one = f"2 × {_si(found.target)} weights", f"{_si(machine.flops)}FLOP/s"
    all_of_them = f"{number} × {one}"
    rows = [
        (
            f"features{'' if is_stored else ', were they stored'}: disk",
            disk.shown(tokens * found.width),
            f"{_si(tokens)} tokens × (2 × {D:,} wide × {1 + len(found.config.taps)} + 5)",
        ),
        (
            f"memory of each {machine.name}" if machine.gpus else "memory",
            f"{disk.shown(found.memory(train.batch_tokens, not is_stored))} of "
            f"{disk.shown(machine.memory)}",
            f"{'' if is_stored else f'{weights} of the target + '}{needs.PER_TRAINED_WEIGHT} × "
            f"{_si(found.trained)} trained weights + tables + {needs.PER_BATCH_NUMBER} × "
            f"{train.batch_tokens:,} tokens × {D:,} wide",
        ),
        (
            "distilling",
            _hours(answers * target / (DECODED * machine.flops * number)),
            f"{_si(answers)} answer tokens × {weights} / ({DECODED} × {all_of_them})",
        ),
        (
            "computing features",
            _hours(tokens * target / machine.flops),
            f"{_si(tokens)} tokens × {weights} / {one}, on one device",
        ),
        (
            "training",
            _hours(seen * a_token / (machine.flops * number)),
            f"{_si(seen)} tokens ({seen / tokens:.1f} epochs) × {_si(a_token)}FLOP, "
            f"{_si(drafter)}FLOP of them the drafter's, / ({all_of_them})",
        ),
    ]
    return rows if is_stored else rows[:3] + rows[4:]


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h" if seconds >= 360 else f"{seconds / 60:.1f} min"


def _si(number: float) -> str:
    """Returns a number as people read it: "8.0 G", "140.0 M", "12.5 k"."""
    for unit, name in ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")):
        if number >= unit:
            return f"{number / unit:.1f}{name}"
    return f"{number:.0f} "
