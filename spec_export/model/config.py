"""Reads the shape of a decoder from a transformers config, and makes its rotary tables."""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from spec_export.model.families import (
    EXPERTS,
    FULL,
    SLIDING,
    Family,
    LayerKind,
    has_tables_by_kind,
    require_known,
)
from spec_export.model.families import FAMILIES as FAMILIES
from spec_runtime.errors import UnsupportedModelError, UserError
from spec_runtime.files.mapping import brief

DEFAULT_SCRATCH = 128
ROPE_KINDS = ("default", "dynamic", "linear", "llama3", "yarn", "longrope")
MAX_COUNT = 1 << 24  # more than any model has, and little enough for tables of this many rows
MAX_TABLE = 1 << 29  # numbers of a rotary table; a million tokens have 2**26
COUNTS = (  # of a transformers config
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)

# Fields that change the forward pass in some families, with the values that change nothing. A model
# whose family's table does not read such a field is refused with any other value.
FOREIGN: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("logit_scale", "logits_scaling", "residual_multiplier"), (1,)),
    **dict.fromkeys(("embedding_multiplier", "scale_emb", "attention_out_multiplier"), (1,)),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "clip_qkv"), (0,)),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), (0,)),
    **dict.fromkeys(("scale_depth", "dim_model_base", "attn_temperature_tuning", "alibi"), (0,)),
    **dict.fromkeys(("use_qk_norm", "qk_layernorm", "no_rope_layers", "parallel_residual"), (0,)),
    **dict.fromkeys(("use_parallel_residual", "use_bidirectional_attention"), (0,)),
}
ROPE_FIELDS = {
    "rope_type",
    "type",
    "rope_theta",
    "partial_rotary_factor",
    "factor",
    "finetuned",
    "original_max_position_embeddings",
    "low_freq_factor",
    "high_freq_factor",
    "attention_factor",
    "attn_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "truncate",
    "short_factor",
    "long_factor",
}
# The caches of a layer, by its mixer.
CACHES = {"attention": ("k", "v"), "convolution": ("c",)}
# The cache i64[1,1,S,1] of each slot's position, in models with convolutions; see
# modules/convolution.py.
POSITIONS = "kv.positions"


@dataclass(frozen=True)
class DecoderConfig:
    """Holds everything that shapes the graph, read once from the transformers config.

    `max_length` is the context in tokens; `scratch` is how many positions (and cache slots) a tree
    may use beyond it. `taps` are ids of layers whose *input* is an output of the graph; the id
    after the last layer's is its output, before the final norm. `rope` is what the manifest keeps
    of the rotary embedding: its kind, its parameters, and which longrope factors were taken. Raises
    UserError for sizes that do not fit each other.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    norm_eps: float
    max_length: int
    scratch: int = DEFAULT_SCRATCH
    taps: tuple[int, ...] = ()
    rope: dict[str, Any] = field(default_factory=dict)
    layers: tuple[LayerKind, ...] = ()

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise UserError(
                f"got {self.num_heads} query heads for {self.num_kv_heads} key/value heads, "
                "expected a multiple"
            )
        if self.rotary_dim % 2 or not 0 < self.rotary_dim <= self.head_dim:
            raise UserError(
                f"got rotary width {self.rotary_dim}, "
                f"expected an even number up to head_dim {self.head_dim}"
            )
        if self.max_length < 1 or self.scratch < 0:
            raise UserError(
                f"got max_length {self.max_length} and scratch {self.scratch}, "
                "expected at least 1 and 0"
            )
        assert len(self.layers) in (0, self.num_layers), (len(self.layers), self.num_layers)
        self.require_taps(self.taps)

    def require_taps(self, taps: Sequence[int]) -> None:
        """Raises UserError unless these are different taps of this decoder."""
        if len(set(taps)) != len(taps) or not set(taps) <= set(range(self.num_layers + 1)):
            raise UserError(
                f"got taps {list(taps)}, expected distinct layer ids from 0 to {self.num_layers}"
            )

    @property
    def rope_factors(self) -> str | None:
        """Names longrope's factors that serve all positions, "short" or "long"; None elsewhere."""
        return self.rope.get("factors")

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """What each layer is."""
        return self.layers or (LayerKind(),) * self.num_layers

    def empty_caches(self, slots: int, dtype: torch.dtype) -> dict[str, Tensor]:
        """Returns zeroed buffers of `slots` rows by name, in the order of the graph's inputs."""
        rows = {
            "attention": (self.num_kv_heads, self.head_dim),
            "convolution": (1, self.hidden_size),
        }
        caches = {}
        for i, kind in enumerate(self.kinds):
            groups, width = rows[kind.mixer]
            for part in CACHES[kind.mixer]:
                caches[f"kv.{i}.{part}"] = torch.zeros(1, groups, slots, width, dtype=dtype)
        if any(kind.mixer == "convolution" for kind in self.kinds):
            caches[POSITIONS] = torch.zeros(1, 1, slots, 1, dtype=torch.int64)
        return caches

    @property
    def windows(self) -> tuple[int, ...]:
        """The widths of the layers' sliding windows, each once, that are narrower than the
        context."""
        widths = {kind.window for kind in self.kinds if kind.window is not None}
        return tuple(sorted(width for width in widths if width < self.max_length))

    @property
    def rows(self) -> int:
        """Positions the rotary tables cover, also the usual number of cache slots S."""
        return self.max_length + self.scratch


def require_supported(raw: Any) -> None:
    """Raises UserError, which names what is not supported, for a config of a known family.

    No weights are needed to tell.
    """
    family = require_known(raw.model_type)
    optional = [name for name in ("num_key_value_heads", "head_dim") if _has(raw, name)]
    for name in (*COUNTS, family.width, *optional):
        _require_count(raw, name)
    eps = family.eps_of(raw)
    if type(eps) not in (int, float) or not math.isfinite(eps) or eps < 0:
        raise UserError(f"got {family.eps} {eps!r:.80} in the config, expected 0 or more")
    layers = family.layers(raw)
    if any(kind.window is not None for kind in layers):
        _require_count(raw, "sliding_window")
    if any(kind.mlp == "experts" for kind in layers):
        _require_supported_experts(raw)
    for parameters in _rope_tables(raw).values():
        _require_supported_rope(raw, parameters, family)
    head_dim = getattr(raw, "head_dim", None) or raw.hidden_size // raw.num_attention_heads
    scale = {"attention_multiplier": (head_dim**-0.5,), "query_pre_attn_scalar": (head_dim,)}
    for name, neutral in (FOREIGN | scale).items():
        value = getattr(raw, name, None)
        if value is not None and value not in neutral and name not in family.fields:
            raise UnsupportedModelError(
                f"got {name} {value!r:.40} in a '{raw.model_type}' model, "
                f"expected {neutral[0]}: this model is not supported"
            )


def _require_count(raw: Any, name: str, most: int = MAX_COUNT) -> int:
    """Returns a number of the config; raises UserError unless it counts something."""
    value = getattr(raw, name)
    if type(value) is not int or not 1 <= value <= most:
        raise UserError(f"got {name} {value!r:.40} in the config, expected 1 to {most}", param=name)
    return value


def _require_supported_experts(raw: Any) -> None:
    """Raises UserError for layers of experts that are not supported."""
    name = next(name for name in EXPERTS if _has(raw, name))
    _require_count(raw, "num_experts_per_tok", _require_count(raw, name))
    if raw.hidden_act != "silu":
        raise UnsupportedModelError(
            f"got experts with activation '{raw.hidden_act!s:.40}' in a '{raw.model_type}' model, "
            "expected 'silu': this model is not supported"
        )


def _has(raw: Any, name: str) -> bool:
    return getattr(raw, name, None) is not None


def read_config(
    raw: Any, taps: tuple[int, ...], max_length: int | None, scratch: int = DEFAULT_SCRATCH
) -> DecoderConfig:
    """Returns the decoder's shape, read from a transformers config of a known family.

    Raises UserError, which names what is not supported.
    """
    require_supported(raw)
    num_heads = raw.num_attention_heads
    head_dim = getattr(raw, "head_dim", None) or raw.hidden_size // num_heads
    if max_length is None:
        max_length = raw.max_position_embeddings
    if max_length > raw.max_position_embeddings:
        raise UserError(
            f"got a max length of {max_length}, "
            f"expected at most the model's {raw.max_position_embeddings} tokens"
        )
    family = FAMILIES[raw.model_type]
    rope, rotated_share = _read_rope(raw, max_length, head_dim)
    return DecoderConfig(
        family=raw.model_type,
        vocab_size=raw.vocab_size,
        hidden_size=raw.hidden_size,
        intermediate_size=getattr(raw, family.width),
        num_layers=raw.num_hidden_layers,
        num_heads=num_heads,
        num_kv_heads=getattr(raw, "num_key_value_heads", None) or num_heads,
        head_dim=head_dim,
        rotary_dim=int(head_dim * rotated_share),
        norm_eps=family.eps_of(raw),
        max_length=max_length,
        scratch=scratch,
        taps=taps,
        rope=rope,
        layers=family.layers(raw),
    )


def _rope_tables(raw: Any) -> dict[str, Any]:
    """Returns the parameters of each rotary table by its name, "" for the default one."""
    rope = raw.rope_parameters
    return {"": rope[FULL], SLIDING: rope[SLIDING]} if has_tables_by_kind(raw) else {"": rope}


def _require_supported_rope(raw: Any, rope: Any, family: Family) -> None:
    """Raises UserError for parameters of a rotary embedding that are not supported."""
    if not isinstance(rope, dict):
        raise UserError(f"got rope_parameters {rope!r:.80} in the config, expected a mapping")
    kind = rope.get("rope_type", "default")
    if kind not in ROPE_KINDS:
        raise UnsupportedModelError(
            f"got rotary embedding '{kind}', which is not supported: "
            f"expected one of {', '.join(ROPE_KINDS)}"
        )
    unknown = sorted(map(str, set(rope) - ROPE_FIELDS - family.fields))
    if unknown:
        raise UnsupportedModelError(
            f"got rotary parameter {unknown[0]!r:.40} in the config, which is not supported: "
            f"expected {', '.join(sorted(ROPE_FIELDS))}"
        )
    theta: Any = rope.get("rope_theta")
    if type(theta) not in (int, float) or not 0 < theta < math.inf:
        raise UserError(f"got rope_theta {theta!r:.80} in the config, expected more than 0")
    alpha: Any = rope.get("alpha", 1)
    if type(alpha) not in (int, float) or not 1 <= alpha < math.inf:
        raise UserError(f"got alpha {alpha!r:.80} in rope_parameters, expected at least 1")
    part: Any = rope.get("partial_rotary_factor") or 1.0
    if type(part) not in (int, float) or not 0 < part <= 1:
        raise UserError(f"got partial_rotary_factor {part!r:.80} in the config, expected 0 to 1")
    if part != 1.0 and not family.rotates_part:
        # transformers' own classes of these families rotate whole heads and ignore the factor.
        raise UnsupportedModelError(
            f"got partial_rotary_factor {part} in a '{raw.model_type}' model, expected 1: "
            "this family rotates whole heads"
        )


def _read_rope(raw: Any, max_length: int, head_dim: int) -> tuple[dict[str, Any], float]:
    """Returns the parameters of the rotary embedding and the share of a head that is rotated.

    Warns if longrope's long factors have to serve short sequences too, and of a factor that engines
    read differently.
    """
    tables = _rope_tables(raw)
    rope = dict(tables.pop("")) | tables
    if rope.get("rope_type") == "dynamic":
        # It stretches contexts beyond the model's own, which are not built, but by Hunyuan's alpha.
        rope["rope_type"] = "default"
        try:
            rope["rope_theta"] *= rope.get("alpha", 1.0) ** (head_dim / (head_dim - 2))
        except ArithmeticError as error:
            raise UserError(f"got rotary parameters {rope!r:.80}: {brief(error)}") from error
    if rope.get("attn_factor", 1) != 1:
        warnings.warn(
            f"got attn_factor {rope['attn_factor']} in the config, which transformers does not "
            "read, and neither does this build; vLLM multiplies the rotation by it",
            stacklevel=4,
        )
    if rope.get("rope_type") == "longrope":
        original = rope["original_max_position_embeddings"]
        rope["factors"] = "long" if max_length > original else "short"
        if max_length > original:
            warnings.warn(
                f"max length {max_length} exceeds the original context of {original}: the long "
                "rotary factors serve all positions, where transformers takes the short ones for "
                f"sequences of up to {original} tokens; build with that max length for those",
                stacklevel=4,
            )
    return rope, rope.get("partial_rotary_factor") or 1.0


def rotary_tables(raw: Any, config: DecoderConfig) -> dict[str, tuple[Tensor, Tensor]]:
    """Returns cos and sin, f32[rows, rotary_dim/2], of each rotary table by its name.

    The attention factor is folded in. The frequencies and the angles are rounded to float32 exactly
    as transformers rounds them, because at position 8000 that rounding is 2e-4 rad, more than any
    other error here. Their cos and sin are taken in float64.
    """
    names = ("", SLIDING) if SLIDING in config.rope else ("",)
    return {name: _rotary_table(raw, config, name) for name in names}


def _rotary_table(raw: Any, config: DecoderConfig, name: str) -> tuple[Tensor, Tensor]:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope, factor = config.rope[name] if name else config.rope, 1.0
    kind = rope.get("rope_type", "default")
    if kind == "default":
        exponent = torch.arange(0, config.rotary_dim, 2, dtype=torch.float32) / config.rotary_dim
        frequency = 1.0 / (rope["rope_theta"] ** exponent)
    else:
        # Only longrope reads seq_len, to pick the long factors above the original context.
        layer_type = (name or FULL) if has_tables_by_kind(raw) else None
        try:
            frequency, factor = ROPE_INIT_FUNCTIONS[kind](
                raw, torch.device("cpu"), seq_len=config.max_length, layer_type=layer_type
            )
        except (KeyError, TypeError, ValueError, ArithmeticError) as error:
            raise UserError(f"got rotary parameters {rope!r:.80}: {brief(error)}") from error
    if not (frequency.isfinite().all() and math.isfinite(factor)):
        raise UserError(f"got rotary parameters {rope!r:.80}, expected finite frequencies")
    if config.rows * len(frequency) > MAX_TABLE:
        raise UserError(
            f"got a context of {config.max_length} tokens, whose rotary table has "
            f"{config.rows * len(frequency):.2g} numbers, expected at most {MAX_TABLE:.2g}: give "
            "a shorter --max-length"
        )
    angle = torch.arange(config.rows, dtype=torch.float32)[:, None] * frequency.float()[None, :]
    return (angle.double().cos() * factor).float(), (angle.double().sin() * factor).float()


def own_rotary_table(rope: dict[str, Any], head_dim: int, num_rows: int) -> tuple[Tensor, Tensor]:
    """Returns cos and sin, f32[num_rows, head_dim/2], of rotary parameters that are not a target's.

    Raises UserError for parameters that are not supported.
    """
    from transformers import LlamaConfig

    if rope.get("rope_type") == "dynamic":
        raise UnsupportedModelError(
            "got rotary embedding 'dynamic' in a drafter, whose frequencies grow with the text: "
            f"expected one of {', '.join(kind for kind in ROPE_KINDS if kind != 'dynamic')}"
        )
    try:
        raw = LlamaConfig(
            hidden_size=head_dim,
            num_attention_heads=1,
            head_dim=head_dim,
            max_position_embeddings=num_rows,
            rope_parameters=dict(rope),
        )
    except (KeyError, TypeError, ValueError) as error:  # transformers checks some kinds itself
        raise UserError(f"got rotary parameters {rope!r:.80}: {brief(error)}") from error
    return rotary_tables(raw, read_config(raw, (), num_rows, 0))[""]


def query_scales(config: DecoderConfig) -> Tensor | None:
    """Returns the factor on queries at each position, f32[rows], None if all are 1."""
    field = FAMILIES[config.family].query_growth
    growth = None if field is None else config.rope.get(field)
    if not growth:
        return None
    original = config.rope["original_max_position_embeddings"]
    position_S = torch.arange(config.rows, dtype=torch.float32)
    scale_S = 1 + growth * torch.log(1 + torch.floor(position_S / original))
    return scale_S if scale_S[-1] > 1 else None
