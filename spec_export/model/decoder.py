"""Defines the traceable backbone, one decoder for all families, and puts it together by a family's
table.

The module also runs eagerly, in tests and comparisons; only a few operators differ under export.

Letters: N rows of one step, M rows of logits asked for, S cache slots, A rows moved, U written,
V vocabulary, D hidden width, H query heads, G key/value heads, Dh head width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from spec_export.model import config as decoder_config
from spec_export.model.config import (
    CACHES,
    DEFAULT_SCRATCH,
    query_scales,
    read_config,
    rotary_tables,
)
from spec_export.model.config import DecoderConfig as DecoderConfig
from spec_export.model.deferred import defer_matrices
from spec_export.model.families import FAMILIES as FAMILIES
from spec_export.model.families import Family, LayerKind, Scale, capped, require_known
from spec_export.model.modules.attention import Attention as Attention
from spec_export.model.modules.attention import SharedInputs as SharedInputs
from spec_export.model.modules.attention import Table, window_mask
from spec_export.model.modules.basic import LayerNorm, Norm
from spec_export.model.modules.basic import Projection as Projection
from spec_export.model.modules.basic import RMSNorm as RMSNorm
from spec_export.model.modules.basic import VocabularyTable as VocabularyTable
from spec_export.model.modules.convolution import Convolution, with_ancestors
from spec_export.model.modules.experts import Experts, interleaved
from spec_export.model.modules.fusion import Fusion
from spec_export.model.modules.mlp import ACTIVATIONS, XIELU, Activation, PlainMLP
from spec_export.model.modules.mlp import GatedMLP as GatedMLP
from spec_export.model.weights import ModelWeights, StoredWeights, Weights
from spec_runtime.errors import UnsupportedModelError


class Layer(nn.Module):
    """A decoder layer on [N,D] activations: something that mixes rows, such as attention, and an
    MLP, each with a norm before it, after it, both or neither."""

    def __init__(
        self,
        attention_norm: Norm | None,
        attention: nn.Module,
        mlp_norm: Norm | None,
        mlp: nn.Module,
        *,
        attention_post_norm: Norm | None = None,
        mlp_post_norm: Norm | None = None,
        parallel: bool = False,
        residual_scale: float = 1.0,
    ) -> None:
        """parallel: the MLP reads what the attention reads, not what it wrote. residual_scale: a
        factor on what attention and MLP add to the residual stream."""
        super().__init__()
        self.attention_norm, self.attention = attention_norm, attention
        self.mlp_norm, self.mlp = mlp_norm, mlp
        self.attention_post_norm, self.mlp_post_norm = attention_post_norm, mlp_post_norm
        self.parallel, self.residual_scale = parallel, residual_scale

    def forward(
        self, x_ND: Tensor, past: Sequence[Tensor], shared: SharedInputs
    ) -> tuple[Tensor, list[Tensor]]:
        """Maps x [N,D] and the layer's caches to (output [N,D], new caches)."""
        read_ND = _through(self.attention_norm, x_ND)
        mixed, caches = self.attention(read_ND, past, shared)
        summed = x_ND + self._scaled(_through(self.attention_post_norm, mixed))
        if not self.parallel:
            read_ND = _through(self.mlp_norm, summed)
        return summed + self._scaled(_through(self.mlp_post_norm, self.mlp(read_ND))), caches

    def _scaled(self, x_ND: Tensor) -> Tensor:
        return x_ND if self.residual_scale == 1 else x_ND * self.residual_scale

    def norms_of_one_product(self) -> list[tuple[Norm, Projection]]:
        """Returns the norms that feed one product and nothing else, each with its product."""
        pairs = ((self.attention_norm, self.attention), (self.mlp_norm, self.mlp))
        return [
            (norm, product)
            for norm, part in pairs
            if norm is not None and not self.parallel
            for product in [getattr(part, "input_product", None)]
            if product is not None
        ]


def _through(norm: Norm | None, x_ND: Tensor) -> Tensor:
    return x_ND if norm is None else norm(x_ND)


class Backbone(nn.Module):
    """Maps token ids to logits, features, taps and fusions of taps; the KV cache is passed in and
    out."""

    cos: Tensor
    sin: Tensor
    query_scale_S: Tensor | None

    def __init__(
        self,
        config: DecoderConfig,
        embedding_VD: Tensor,
        layers: Sequence[Layer],
        norm: Norm,
        head_VD: Tensor | None,
        tables: Mapping[str, Table],
        *,
        query_scale_S: Tensor | None = None,
        embedding_scale: float = 1.0,
        logit_scale: float = 1.0,
        logit_softcap: float = 0.0,
    ) -> None:
        """`head_VD` None ties head and embedding. `tables` are the rotary tables by name, "" the
        default one. `query_scale_S`, if given, scales queries by position. Logits are scaled, then
        `capped`."""
        super().__init__()
        self.config = config
        self.embedding = VocabularyTable(embedding_VD, embedding_scale=embedding_scale)
        self.layers = nn.ModuleList(layers)
        self.norm = norm
        self.head = self.embedding if head_VD is None else VocabularyTable(head_VD)
        self.logit_scale, self.logit_softcap = logit_scale, logit_softcap
        for name, table in tables.items():
            for part, values in zip(("cos", "sin"), table, strict=True):
                buffer = values.to(embedding_VD.dtype)
                self.register_buffer(_buffer_name(part, name), buffer, persistent=False)
        scale_S = None if query_scale_S is None else query_scale_S.to(embedding_VD.dtype)
        self.register_buffer("query_scale_S", scale_S, persistent=False)
        self._more_tables = tuple(name for name in tables if name)
        self.fusions = nn.ModuleDict()

    @property
    def dtype(self) -> torch.dtype:
        """The type of the weights, which is also that of the caches."""
        return self.embedding.weight.dtype

    def tables(self) -> dict[str, Table]:
        """Returns the rotary tables by name, without the default one."""
        return {
            name: (
                getattr(self, _buffer_name("cos", name)),
                getattr(self, _buffer_name("sin", name)),
            )
            for name in self._more_tables
        }

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        mask: Tensor,
        logit_rows: Tensor,
        write_index: Tensor,
        src: Tensor,
        perm: Tensor,
        *kv: Tensor,
    ) -> tuple[Tensor, ...]:
        """Runs one step over N rows.

        input_ids i64[1,N], position_ids i64[1,N], mask bool[1,1,N,S] (True = attend), logit_rows
        i64[M], write_index i64[1], src i64[A], perm i64[A+N], kv as `config.empty_caches` orders
        it; an eager run does not change kv. write_index + A + N may not exceed S.
        Returns logits f32[M,V], features f32[N,D] (after the final norm), one f32[N,D] per tap in
        the order of `config.taps`, the output of each fusion, then the caches.
        """
        shared = self.shared_inputs(position_ids, mask, write_index, src, perm)
        states, caches = self.run_layers(input_ids, kv, shared, self.config.num_layers)
        features_ND = self.norm(states[-1])
        logits_MV = self.head.score(features_ND.index_select(0, logit_rows))
        if self.logit_scale != 1:
            logits_MV = logits_MV * self.logit_scale
        logits_MV = capped(logits_MV.float(), self.logit_softcap)
        taps = [states[i].float() for i in self.config.taps]
        fused = []
        for fusion in self.fusions.values():
            assert isinstance(fusion, Fusion), fusion
            fused.append(fusion([states[i].float() for i in fusion.taps]))
        return (logits_MV, features_ND.float(), *taps, *fused, *caches)

    def add_fusion(self, name: str, fusion: Fusion) -> None:
        """Makes what this drafter reads of the target an output of the graph.

        Raises UserError if it reads layers that the target does not have.
        """
        self.config.require_taps(fusion.taps)
        self.fusions[name] = fusion

    def run_layers(
        self, input_ids: Tensor, kv: Sequence[Tensor], shared: SharedInputs, num_layers: int
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Runs the first layers over the ids i64[1,N] and their caches.

        Returns what each layer reads and what the last one writes, [N,D] each, and the new caches.
        """
        states = [self.embedding.embed(input_ids.view(-1))]
        caches: list[Tensor] = []
        shared, positions = self.with_ancestors(kv, shared, num_layers)
        for layer, kind in zip(self.layers[:num_layers], self.config.kinds, strict=False):
            past = kv[len(caches) : len(caches) + len(CACHES[kind.mixer])]
            x_ND, new = layer(states[-1], past, shared)
            states.append(x_ND)
            caches += new
        return states, caches + positions

    def with_ancestors(
        self, kv: Sequence[Tensor], shared: SharedInputs, num_layers: int
    ) -> tuple[SharedInputs, list[Tensor]]:
        """Returns the inputs with each row's ancestors and the new cache of positions, if one of
        the first layers reads them; else the inputs as they are and no cache."""
        num_ancestors = max(
            getattr(layer.attention, "num_ancestors", 0) for layer in self.layers[:num_layers]
        )
        if not num_ancestors:
            return shared, []
        shared, written = with_ancestors(shared, kv[-1], num_ancestors)
        return shared, [written]

    def shared_inputs(
        self, position_ids: Tensor, mask: Tensor, write_index: Tensor, src: Tensor, perm: Tensor
    ) -> SharedInputs:
        """Returns what all layers read in one pass; for shapes see `forward`."""
        scale = self.query_scale_S
        if scale is not None:
            scale = scale.index_select(0, position_ids.view(-1)).view(1, 1, -1, 1)
        step = (position_ids, mask, write_index, src, perm, self.cos, self.sin)
        windows = {width: window_mask(mask, width) for width in self.config.windows}
        return SharedInputs(*step, windows, self.tables(), scale)

    @classmethod
    def from_transformers(
        cls,
        hf_model: Any,
        taps: Sequence[int] = (),
        max_length: int | None = None,
        scratch: int = DEFAULT_SCRATCH,
    ) -> Backbone:
        """Returns the backbone of a transformers causal LM, which shares its weights.

        `max_length`: the context in tokens, the model's own by default. With longrope, the long
        factors serve all positions if `max_length` exceeds the original context, else the short
        ones do. Raises UserError for a model that is not supported.
        """
        require_supported(hf_model.config)
        weights = ModelWeights(hf_model)
        return cls.from_weights(hf_model.config, weights, taps, max_length, scratch)

    @classmethod
    def deferred(
        cls,
        raw: Any,
        weights: StoredWeights,
        taps: Sequence[int] = (),
        max_length: int | None = None,
    ) -> Backbone:
        """Returns the backbone of a transformers config whose matrices are read when needed.

        See `from_transformers`. A layer is put together anew to read one of its matrices, and kept
        until another layer is asked for.
        """
        backbone = cls.from_weights(raw, weights.outline(), taps, max_length)
        family = FAMILIES[raw.model_type]
        around = _Part(raw, family, backbone.config, weights, "")

        held: dict[int, Layer] = {}

        def read(i: int, name: str) -> Tensor:
            if i not in held:
                held.clear()
                held[i] = assemble_layer(raw, backbone.config, weights, i)
            return held[i].get_parameter(name).detach()

        for i, layer in enumerate(backbone.layers):
            defer_matrices(layer, partial(read, i))
        embedding = f"{family.prefix}embed_tokens.weight"
        defer_matrices(backbone.embedding, lambda name: around.tensor(embedding))
        defer_matrices(backbone.head, lambda name: around.tensor("lm_head.weight"))
        return backbone

    @classmethod
    def from_weights(
        cls,
        raw: Any,
        weights: Weights,
        taps: Sequence[int] = (),
        max_length: int | None = None,
        scratch: int = DEFAULT_SCRATCH,
    ) -> Backbone:
        """Returns the backbone of a transformers config, with the tensors of `weights`.

        See `from_transformers`. Tensors are asked for in order: the embedding, layer by layer, the
        final norm, the head.
        """
        require_supported(raw)
        family = FAMILIES[raw.model_type]
        config = read_config(raw, tuple(taps), max_length, scratch)
        whole = _Part(raw, family, config, weights, family.prefix)
        embedding = whole.tensor("embed_tokens.weight")
        layers = [assemble_layer(raw, config, weights, i) for i in range(config.num_layers)]
        norm = whole.norm(family.final_norm)
        assert norm is not None, family
        head = weights.get("lm_head.weight")
        backbone = cls(
            config,
            embedding,
            layers,
            norm,
            None if head is embedding else head,
            rotary_tables(raw, config),
            query_scale_S=query_scales(config),
            embedding_scale=_scale(family.embedding_scale, raw),
            logit_scale=_scale(family.logit_scale, raw),
            logit_softcap=whole.softcap(family.final_softcap),
        )
        unread = weights.unread()
        if unread:
            raise UnsupportedModelError(
                f"got the tensor {unread[0]} in a '{raw.model_type}' model, expected only those "
                "that its decoder reads: this model is not supported"
            )
        return backbone.eval()


def _buffer_name(part: str, table: str) -> str:
    return f"{part}_{table}" if table else part


# ---- assembly ----


PLAIN = LayerKind()


@dataclass(frozen=True)
class _Part:
    """What a part of a backbone is built from: a layer, or what stands around the layers.

    Names are relative to `prefix`.
    """

    raw: Any
    family: Family
    config: DecoderConfig
    weights: Weights
    prefix: str
    kind: LayerKind = PLAIN

    def maybe(self, name: str) -> Tensor | None:
        """Returns a tensor, None if the model does not have it."""
        return self.weights.get(self.prefix + name)

    def tensor(self, name: str) -> Tensor:
        """Returns a tensor; raises UnsupportedModelError if the model does not have it."""
        found = self.maybe(name)
        if found is None:
            self._refuse(name)
        return found

    def rows(self, name: str) -> int:
        """Returns the number of a tensor's rows, as `tensor` without reading it."""
        shape = self.weights.shape(self.prefix + name)
        if shape is None:
            self._refuse(name)
        return shape[0]

    def _refuse(self, name: str) -> NoReturn:
        raise UnsupportedModelError(
            f"got no tensor {self.prefix}{name} in a '{self.raw.model_type}' model, expected one: "
            "this model is not supported"
        )

    def projection(self, *names: str) -> Projection:
        """Returns one product for several linear layers of the same input, with their outputs side
        by side and their biases added where they have one."""
        sizes = [self.rows(f"{name}.weight") for name in names]
        weight = self.weights.joined([f"{self.prefix}{name}.weight" for name in names])
        biases = [self.maybe(f"{name}.bias") for name in names]
        given = next((bias for bias in biases if bias is not None), None)
        if given is None:
            return Projection(weight)
        filled = [
            given.new_zeros(size) if bias is None else bias
            for size, bias in zip(sizes, biases, strict=True)
        ]
        return Projection(weight, torch.cat(filled))

    def norm(self, name: str | None) -> Norm | None:
        """Returns a norm of the family's kind, None without a name."""
        if name is None:
            return None
        eps = self.family.eps_of(self.raw)
        if self.family.has_norm_weights:
            weight = self.tensor(f"{name}.weight")
        else:
            weight = torch.ones(self.config.hidden_size, dtype=self.weights.dtype)
        if self.family.unit_offset:
            weight = weight + 1
        if self.family.norm == "layer":
            return LayerNorm(weight, self.maybe(f"{name}.bias"), eps)
        return RMSNorm(weight, eps)

    def softcap(self, field: str | None) -> float:
        """Returns the softcap in this field of the config, 0 for none."""
        return 0.0 if field is None else float(getattr(self.raw, field, None) or 0.0)


def _scale(scale: Scale | None, raw: Any) -> float:
    return 1.0 if scale is None else scale.of(raw)


def assemble_layer(raw: Any, config: DecoderConfig, weights: Weights, index: int) -> Layer:
    """Returns one layer of the model of a transformers config, with the tensors of `weights`."""
    family, kind = FAMILIES[config.family], config.kinds[index]
    part = _Part(raw, family, config, weights, f"{family.prefix}layers.{index}.", kind)
    return Layer(
        part.norm(family.attention_norm),
        MIXERS[part.kind.mixer](part),
        part.norm(None if family.is_parallel(part.raw) else family.mlp_norm),
        MLPS[part.kind.mlp](part),
        attention_post_norm=part.norm(family.attention_post_norm),
        mlp_post_norm=part.norm(family.mlp_post_norm),
        parallel=family.is_parallel(part.raw),
        residual_scale=_scale(family.residual_scale, part.raw),
    )


def _attention(part: _Part) -> Attention:
    family = part.family
    scale = family.attention_scale
    return Attention(
        part.config,
        part.projection(*family.qkv),
        part.projection(family.out),
        part.norm(family.q_norm),
        part.norm(family.k_norm),
        qk_norm=family.qk_norm,
        rope=part.kind.rope,
        interleaved=family.interleaved,
        window=part.kind.window,
        scale=None if scale is None else scale.of(part.raw),
        softcap=part.softcap(family.attention_softcap),
        sinks_H=None if family.sinks is None else part.tensor(family.sinks),
    )


def _convolution(part: _Part) -> Convolution:
    return Convolution(
        part.projection("conv.in_proj"),
        part.tensor("conv.conv.weight")[:, 0],
        part.maybe("conv.conv.bias"),
        part.projection("conv.out_proj"),
    )


def _activation(part: _Part) -> Activation:
    name = part.family.activation_of(part.raw)
    if name != "xielu":
        return ACTIVATIONS[name]
    numbers = ("alpha_p", "alpha_n", "beta", "eps")
    return XIELU(*(part.tensor(f"mlp.act_fn.{number}") for number in numbers))


def _mlp(part: _Part, kind: Callable[..., nn.Module]) -> nn.Module:
    family, activation = part.family, _activation(part)
    return kind(part.projection(*family.up), part.projection(family.down), activation)


def _experts(part: _Part) -> Experts:
    table, raw = part.family.experts, part.raw
    assert table is not None, part.family
    gate_up, down = part.tensor(table.gate_up), part.tensor(table.down)
    if table.is_turned:
        gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
    else:
        gate_up = interleaved(gate_up)
    *shared_up, shared_down = table.shared or (None,)
    shared_gate = table.shared_gate
    return Experts(
        part.projection(table.router),
        gate_up,
        down,
        part.maybe(f"{table.gate_up}_bias"),
        part.maybe(f"{table.down}_bias"),
        num_chosen=raw.num_experts_per_tok,
        normalizes=(
            getattr(raw, table.normalizes)
            if isinstance(table.normalizes, str)
            else table.normalizes
        ),
        sharpness=1.0 if table.sharpness is None else getattr(raw, table.sharpness),
        limit=None if table.limit is None else getattr(raw, table.limit),
        shift=table.shift,
        shared=(
            None
            if shared_down is None
            else GatedMLP(part.projection(*shared_up), part.projection(shared_down))
        ),
        shared_gate=None if shared_gate is None else part.projection(shared_gate),
    )


# What builds the parts of a layer, by the names in its `LayerKind`.
MIXERS: dict[str, Callable[[_Part], nn.Module]] = {
    "attention": _attention,
    "convolution": _convolution,
}
MLPS: dict[str, Callable[[_Part], nn.Module]] = {
    "gated": partial(_mlp, kind=GatedMLP),
    "plain": partial(_mlp, kind=PlainMLP),
    "experts": _experts,
}


def require_supported(raw: Any) -> None:
    """Raises UserError, which names what is not supported, unless this is the transformers config
    of a model that `Backbone.from_transformers` takes.

    The weights are not needed, and may still turn out not to fit.
    """
    family = require_known(raw.model_type)
    activation = family.activation_of(raw)
    known = (*ACTIVATIONS, "xielu")
    if activation not in known:
        raise UnsupportedModelError(
            f"got activation '{activation!s:.40}', expected one of {', '.join(known)}: "
            "this model is not supported"
        )
    decoder_config.require_supported(raw)
