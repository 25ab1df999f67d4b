"""Says how a family of models differs from the others: names of submodules, and a few switches.

Nothing here imports torch or transformers, so that an unknown family is refused at once. `raw` is
always a transformers config.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from spec_runtime.errors import UnsupportedModelError, UserError

EXPERTS = ("num_experts", "num_local_experts")  # fields of a config that count experts
FULL, SLIDING = "full_attention", "sliding_attention"  # kinds of layers in a config


@dataclass(frozen=True)
class LayerKind:
    """What one layer is made of.

    mixer: what mixes rows, by its name in `decoder.MIXERS`. window: the width of a sliding window,
    None if the layer sees the whole context. rope: the name of its rotary table, "" the default
    one, None without rotation. mlp: by its name in `decoder.MLPS`.
    """

    mixer: str = "attention"
    window: int | None = None
    rope: str | None = ""
    mlp: str = "gated"


@dataclass(frozen=True)
class Scale:
    """A factor that is a number of the config to a power; 1 where the config has no such number.

    Example: Scale("query_pre_attn_scalar", -0.5) of a config with 256 is 1/16.
    """

    field: str
    power: float = 1.0

    def of(self, raw: Any) -> float:
        """Returns the factor of this transformers config; raises UnsupportedModelError for one
        that is no finite number or cannot be raised to the power."""
        value = getattr(raw, self.field, None)
        if value is None:
            return 1.0
        if type(value) not in (int, float) or not 0 < abs(value) < 1e9 or value < 0:
            raise UnsupportedModelError(
                f"got {self.field} {value!r:.40} in a '{raw.model_type}' model, expected a number "
                "above 0"
            )
        return float(value**self.power)


def capped(scores: Any, softcap: float) -> Any:
    """Returns softcap·tanh(score/softcap) of a tensor, the scores themselves for a softcap of 0."""
    return (scores / softcap).tanh() * softcap if softcap else scores


def rope_everywhere(raw: Any, layer: int) -> bool:
    """Says that every layer rotates its queries and keys."""
    return True


def layer_window(raw: Any, layer: int) -> int | None:
    """Returns the width of a layer's sliding window, None if it has none.

    Without `layer_types` in the config, `sliding_window` is that of all layers. Raises
    UnsupportedModelError for a layer that is no attention.
    """
    types = getattr(raw, "layer_types", None)
    kind = types[layer] if types else SLIDING
    if kind not in (FULL, SLIDING, "attention"):
        # transformers renames the layers that a config calls "mamba"
        recurrent = " (such layers have a recurrent state)" if kind == "linear_attention" else ""
        raise UnsupportedModelError(
            f"got layers of kind {kind!r:.40}{recurrent} in a '{raw.model_type}' model, expected "
            f"{FULL} or {SLIDING}: this model is not supported"
        )
    return getattr(raw, "sliding_window", None) if kind == SLIDING else None


@dataclass(frozen=True)
class ExpertsTable:
    """How a family's layers of experts differ; names are relative to the layer.

    normalizes: the chosen experts' weights sum to 1; a field of the config if models of the family
    differ. is_turned: weights are stored [experts, in, out], gate and up interleaved. sharpness
    and limit: fields of the config with numbers of the activation, see `model.modules.experts`;
    shift is added to up. shared: names of an MLP that every row goes through, (gate, up, down), and
    shared_gate what gives its share.
    """

    router: str = "mlp.gate"
    gate_up: str = "mlp.experts.gate_up_proj"
    down: str = "mlp.experts.down_proj"
    normalizes: bool | str = True
    is_turned: bool = False
    sharpness: str | None = None
    limit: str | None = None
    shift: float = 0.0
    shared: tuple[str, str, str] | None = None
    shared_gate: str | None = None


@dataclass(frozen=True)
class Family:
    """One family's table. Names are paths in transformers' state dict, relative to a layer or, for
    `final_norm`, to `prefix`; an absent part is None.

    qkv and up: one name if the checkpoint has the product fused, else one for each part.
    sinks: a logit for each query head that takes part in its softmax and has no value.
    q_norm and k_norm stand where `qk_norm` says: "head" (over each head, before the rotation),
    "head_after" (after it) or "whole" (over all heads at once). attention_norm and mlp_norm stand
    before their part, the post-norms after it, before the residual sum. mlp: by its name in
    `decoder.MLPS`; width: the field of the config with the MLP's inner width.

    norm: "rms" or "layer"; unit_offset: weights are stored without their 1; has_norm_weights: there
    are any. eps, unless it is a number, activation and the softcaps are fields of the config.
    parallel: attention and MLP both read the attention's norm
    and are summed; a field of the config if models of the family differ. rotates_part: heed
    partial_rotary_factor. interleaved: neighbours are rotated, not halves. query_growth: a rotary
    parameter b by which queries at position p are scaled by 1 + b·log(1 + floor(p / original
    context)). window, rope, layer_mlp and layer_mixer answer by layer. experts: of the layers whose
    MLP is "experts". reads: fields of the config
    that matter and that only such functions, or mixers, read.
    """

    prefix: str = "model."
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    out: str = "self_attn.o_proj"
    q_norm: str | None = None
    k_norm: str | None = None
    sinks: str | None = None
    attention_norm: str | None = "input_layernorm"
    attention_post_norm: str | None = None
    mlp_norm: str | None = "post_attention_layernorm"
    mlp_post_norm: str | None = None
    final_norm: str = "norm"
    mlp: str = "gated"
    up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    width: str = "intermediate_size"

    norm: str = "rms"
    unit_offset: bool = False
    has_norm_weights: bool = True
    eps: str | float = "rms_norm_eps"
    qk_norm: str = "head"
    parallel: bool | str = False
    activation: str | None = "hidden_act"
    rotates_part: bool = False
    interleaved: bool = False
    embedding_scale: Scale | None = None
    attention_scale: Scale | None = None
    residual_scale: Scale | None = None
    logit_scale: Scale | None = None
    query_growth: str | None = None
    attention_softcap: str | None = None
    final_softcap: str | None = None
    window: Callable[[Any, int], int | None] = layer_window
    rope: Callable[[Any, int], bool] = rope_everywhere
    layer_mlp: Callable[[Any, int], str] | None = None
    layer_mixer: Callable[[Any, int], str] | None = None
    experts: ExpertsTable | None = None
    reads: tuple[str, ...] = ()

    @property
    def fields(self) -> frozenset[str]:
        """Names the config's fields that this family reads and others ignore."""
        scales = (
            *(self.embedding_scale, self.attention_scale),
            *(self.residual_scale, self.logit_scale),
        )
        named = (self.attention_softcap, self.final_softcap, self.parallel, self.query_growth)
        return frozenset(
            (
                *(scale.field for scale in scales if scale is not None),
                *(name for name in named if isinstance(name, str)),
                *(EXPERTS if self.experts is not None else ()),
                *self.reads,
            )
        )

    def eps_of(self, raw: Any) -> Any:
        """Returns what is added under the norms' root."""
        return getattr(raw, self.eps) if isinstance(self.eps, str) else self.eps

    def activation_of(self, raw: Any) -> str:
        """Returns the name of the MLPs' activation; families without a field for it have SiLU."""
        return "silu" if self.activation is None else str(getattr(raw, self.activation))

    def logits(self, raw: Any, scores: Any) -> Any:
        """Returns the logits [..., V] of an LM head's scores, a tensor: scaled, then capped."""
        if self.logit_scale is not None:
            scores = scores * self.logit_scale.of(raw)
        cap = None if self.final_softcap is None else getattr(raw, self.final_softcap, None)
        return capped(scores, cap or 0.0)

    def is_parallel(self, raw: Any) -> bool:
        """Says whether attention and MLP read one norm in this model."""
        return (
            bool(getattr(raw, self.parallel, False))
            if isinstance(self.parallel, str)
            else self.parallel
        )

    def layers(self, raw: Any) -> tuple[LayerKind, ...]:
        """Returns what each layer of this model is; raises UnsupportedModelError for layers that
        are not supported."""
        try:
            return tuple(self._layer(raw, i) for i in range(raw.num_hidden_layers))
        except (IndexError, TypeError):
            raise UserError(
                f"got a list by layer that does not have {raw.num_hidden_layers} entries in the "
                "config, expected one for each of num_hidden_layers"
            ) from None

    def _layer(self, raw: Any, i: int) -> LayerKind:
        mlp = self.mlp if self.layer_mlp is None else self.layer_mlp(raw, i)
        mixer = "attention" if self.layer_mixer is None else self.layer_mixer(raw, i)
        if mixer != "attention":
            return LayerKind(mixer, None, None, mlp)
        window = self.window(raw, i)
        has_own_table = has_tables_by_kind(raw) and raw.layer_types[i] == SLIDING
        table = SLIDING if has_own_table else ""
        return LayerKind(mixer, window, table if self.rope(raw, i) else None, mlp)


def has_tables_by_kind(raw: Any) -> bool:
    """Says whether a config has rotary parameters for each kind of layers."""
    rope = getattr(raw, "rope_parameters", None)
    return isinstance(rope, dict) and isinstance(rope.get(FULL), dict) and SLIDING in rope
