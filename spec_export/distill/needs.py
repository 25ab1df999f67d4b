"""Foretells what a distillation takes: memory at its peak, and room on the disk."""

from spec_export.distill.config import DistillConfig
from spec_export.model import checkpoint, target
from spec_export.model.config import read_config
from spec_export.report import Report
from spec_export.training import disk

LIBRARIES = 700_000_000  # torch, transformers and an engine
WIDTHS = {"fp32": 4, "bf16": 2, "fp16": 2}
PER_WEIGHT = 8  # bytes while it is read: in float32, and once more
PER_TOKEN = 8  # bytes of a token's number in the file


def say(
    config: DistillConfig, source: target.Source, rows: int, longest: int, report: Report
) -> None:
    """Reports what it takes to write `rows` rows after prompts of up to `longest` tokens."""
    raw = target.read_config(source)
    shape, width = read_config(raw, (), None), WIDTHS[config.precision]
    weights = checkpoint.outline(raw).num_parameters()
    kv_row = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * width
    tokens = longest + config.turns * config.max_new_tokens
    batch = config.batch_size * (min(tokens, shape.max_length) * kv_row + 8 * shape.vocab_size)
    disk.foretell(
        "distilling",
        LIBRARIES + max(PER_WEIGHT * weights, width * weights + batch),
        rows * tokens * PER_TOKEN,
        config.out.parent,
        report,
    )
