"""Defines the traceable backbone: one decoder for all families, with an adapter for each.

The module also runs eagerly, in tests and comparisons; only `_scatter_rows` differs under export.

Letters: N rows of one step, M rows of logits asked for, S cache slots, A rows moved, U written,
V vocabulary, D hidden width, H query heads, G key/value heads, Dh head width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spec_export import decoder_config
from spec_export.decoder_config import DEFAULT_SCRATCH, read_config, rotary_tables
from spec_export.decoder_config import DecoderConfig as DecoderConfig
from spec_runtime.errors import UnsupportedModelError


def _frozen(tensor: Tensor) -> nn.Parameter:
    """Returns a parameter that shares the tensor's memory and takes no gradient."""
    return nn.Parameter(tensor.detach(), requires_grad=False)


class Projection(nn.Module):
    """Computes x @ W (+ bias), x_ND -> [N, out]; W is held [in, out], so that one MatMul suffices.

    W may be a transposed view of a transformers weight [out, in]: no bytes are copied.
    """

    bias: nn.Parameter | None

    def __init__(self, weight_out_in: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.weight = _frozen(weight_out_in.t())
        self.bias = None if bias is None else _frozen(bias)

    def forward(self, x_ND: Tensor) -> Tensor:
        y = x_ND @ self.weight
        return y if self.bias is None else y + self.bias


class RMSNorm(nn.Module):
    """Applies the root-mean-square norm over the last axis, with a learned scale."""

    def __init__(self, weight_D: Tensor, eps: float) -> None:
        super().__init__()
        self.weight = _frozen(weight_D)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class VocabularyTable(nn.Module):
    """Holds one row per token id, read as embedding or as LM head; tied models use one for both."""

    input_scale: nn.Parameter | None

    def __init__(self, weight_VD: Tensor, input_scale_D: Tensor | None = None) -> None:
        """`input_scale_D`, if given, scales what `score` reads, for a head that was smoothed."""
        super().__init__()
        self.weight = _frozen(weight_VD)
        self.input_scale = None if input_scale_D is None else _frozen(input_scale_D)

    def embed(self, ids_N: Tensor) -> Tensor:
        """Returns the rows of these ids, [N,D]."""
        return F.embedding(ids_N, self.weight)

    def score(self, x_MD: Tensor) -> Tensor:
        """Returns logits [M,V]; exported as Gemm with transB=1, which stores a tied table once."""
        return F.linear(x_MD if self.input_scale is None else x_MD * self.input_scale, self.weight)


@dataclass(frozen=True)
class SharedInputs:
    """Holds the inputs that all layers share in one pass; for shapes see `Backbone.forward`."""

    position_ids: Tensor
    mask: Tensor
    write_index: Tensor
    src: Tensor
    perm: Tensor
    cos: Tensor
    sin: Tensor


def _scatter_rows(cache_GSD: Tensor, update_GUD: Tensor, write_index: Tensor) -> Tensor:
    """Returns the cache [1,G,S,Dh] with U of its rows, from write_index on, replaced.

    The update is [1,G,U,Dh]. Example: write_index 10 and U = 3 replace rows 10, 11 and 12.
    """
    if torch.onnx.is_in_onnx_export():
        return torch.onnx.ops.symbolic(
            "TensorScatter",
            (cache_GSD, update_GUD, write_index),
            attrs={"axis": -2},
            dtype=cache_GSD.dtype,
            shape=cache_GSD.shape,
            version=24,
        )
    slots_U = write_index + torch.arange(update_GUD.shape[2], device=cache_GSD.device)
    return cache_GSD.index_copy(2, slots_U, update_GUD)


class Attention(nn.Module):
    """Attends over a cache with grouped queries: one QKV product, one rotary call, two writes."""

    def __init__(
        self,
        config: DecoderConfig,
        qkv: Projection,
        out: Projection,
        q_norm: RMSNorm | None = None,
        k_norm: RMSNorm | None = None,
    ) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.head_dim = config.head_dim
        # The operator's own default (0) means "all of the head".
        self.rotary_dim = 0 if config.rotary_dim == config.head_dim else config.rotary_dim
        self.qkv, self.out, self.q_norm, self.k_norm = qkv, out, q_norm, k_norm

    def forward(
        self, x_ND: Tensor, past_k: Tensor, past_v: Tensor, shared: SharedInputs
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Maps x [N,D] and past [1,G,S,Dh] to (output [N,D], key cache, value cache)."""
        H, G, Dh = self.num_heads, self.num_kv_heads, self.head_dim
        heads = self.qkv(x_ND).view(1, -1, H + 2 * G, Dh).transpose(1, 2)
        if self.q_norm is not None and self.k_norm is not None:
            q, k, v = heads.split((H, G, G), dim=1)
            qk = torch.cat((self.q_norm(q), self.k_norm(k)), dim=1)
        else:
            qk, v = heads.split((H + G, G), dim=1)
        qk = torch.onnx.ops.rotary_embedding(
            qk, shared.cos, shared.sin, shared.position_ids, rotary_embedding_dim=self.rotary_dim
        )
        q, k = qk.split((H, G), dim=1)
        k, v = self._write(past_k, k, shared), self._write(past_v, v, shared)
        # The exporter refuses the flag where every query head has keys of its own.
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=shared.mask, enable_gqa=H != G)
        return self.out(mixed.transpose(1, 2).contiguous().view(-1, H * Dh)), k, v

    @staticmethod
    def _write(past: Tensor, new: Tensor, shared: SharedInputs) -> Tensor:
        """Keeps the last step's accepted rows and appends this step's, in a single scatter.

        Example: the length is 10. The last step wrote rows 10 to 12, of which 10 and 12 were
        accepted. The new rows are x and y, and there is room to move A = 3 rows. With write_index
        10, src [10, 12, 0] and perm [0, 1, 3, 4, 2], rows 10 to 14 become old 10, old 12, x, y and
        a row that is not used.
        """
        update = torch.cat((past.index_select(2, shared.src), new), dim=2).index_select(
            2, shared.perm
        )
        return _scatter_rows(past, update, shared.write_index)


class GatedMLP(nn.Module):
    """Computes down(SiLU(gate) * up), with gate and up in one product.

    SiLU is written as x * sigmoid(x) because opset 24's Swish has no CPU kernel.
    """

    def __init__(self, gate_up: Projection, down: Projection) -> None:
        super().__init__()
        self.gate_up, self.down = gate_up, down

    def forward(self, x_ND: Tensor) -> Tensor:
        gate, up = self.gate_up(x_ND).chunk(2, dim=-1)
        return self.down(gate * torch.sigmoid(gate) * up)


class Layer(nn.Module):
    """A decoder layer on [N,D] activations, with norms before attention and before the MLP."""

    def __init__(
        self, attention_norm: RMSNorm, attention: Attention, mlp_norm: RMSNorm, mlp: GatedMLP
    ) -> None:
        super().__init__()
        self.attention_norm, self.attention = attention_norm, attention
        self.mlp_norm, self.mlp = mlp_norm, mlp

    def forward(
        self, x_ND: Tensor, past_k: Tensor, past_v: Tensor, shared: SharedInputs
    ) -> tuple[Tensor, Tensor, Tensor]:
        mixed, k, v = self.attention(self.attention_norm(x_ND), past_k, past_v, shared)
        x_ND = x_ND + mixed
        return x_ND + self.mlp(self.mlp_norm(x_ND)), k, v


class Backbone(nn.Module):
    """Maps token ids to logits, features and taps; the KV cache is passed in and out."""

    cos: Tensor
    sin: Tensor

    def __init__(
        self,
        config: DecoderConfig,
        embedding_VD: Tensor,
        layers: Sequence[Layer],
        norm: RMSNorm,
        head_VD: Tensor | None,
        tables: tuple[Tensor, Tensor],
    ) -> None:
        """`head_VD` None ties head and embedding. `tables` are cos and sin [rows, rotary_dim/2]."""
        super().__init__()
        self.config = config
        self.embedding = VocabularyTable(embedding_VD)
        self.layers = nn.ModuleList(layers)
        self.norm = norm
        self.head = self.embedding if head_VD is None else VocabularyTable(head_VD)
        cos, sin = (table.to(embedding_VD.dtype) for table in tables)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    @property
    def dtype(self) -> torch.dtype:
        """The type of the weights, which is also that of the caches."""
        return self.embedding.weight.dtype

    def empty_cache(self, slots: int | None = None) -> list[Tensor]:
        """Returns zeroed key and value buffers, [1,G,slots,Dh] each: k0, v0, k1, v1, …"""
        c = self.config
        shape = (1, c.num_kv_heads, slots or c.rows, c.head_dim)
        return [torch.zeros(shape, dtype=self.dtype) for _ in range(2 * c.num_layers)]

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
        i64[M], write_index i64[1], src i64[A], perm i64[A+N], kv as `empty_cache` orders it; an
        eager run does not change kv. write_index + A + N may not exceed S.
        Returns logits f32[M,V], features f32[N,D] (after the final norm), one f32[N,D] per tap in
        the order of `config.taps`, then the caches.
        """
        shared = SharedInputs(position_ids, mask, write_index, src, perm, self.cos, self.sin)
        x_ND = self.embedding.embed(input_ids.view(-1))
        tapped: dict[int, Tensor] = {}
        caches: list[Tensor] = []
        for i, layer in enumerate(self.layers):
            if i in self.config.taps:
                tapped[i] = x_ND
            x_ND, k, v = layer(x_ND, kv[2 * i], kv[2 * i + 1], shared)
            caches += (k, v)
        features_ND = self.norm(x_ND)
        logits_MV = self.head.score(features_ND.index_select(0, logit_rows))
        taps = [tapped[i].float() for i in self.config.taps]
        return (logits_MV.float(), features_ND.float(), *taps, *caches)

    @classmethod
    def from_transformers(
        cls,
        hf_model: Any,
        taps: Sequence[int] = (),
        max_length: int | None = None,
        scratch: int = DEFAULT_SCRATCH,
    ) -> Backbone:
        """Returns the backbone of a transformers causal LM, which shares its weights.

        A fused product needs its parts side by side. They are copied once, and the model's own
        parameters become views of the copy: the model keeps working and memory does not grow.
        `max_length`: the context in tokens, the model's own by default; it is lowered to a narrower
        sliding window, with a warning. With longrope, the long factors serve all positions if
        `max_length` exceeds the original context, else the short ones do. Raises UserError for a
        model that is not supported.
        """
        raw = hf_model.config
        require_supported(raw)
        adapter = FAMILIES[raw.model_type]
        config = read_config(raw, tuple(taps), max_length, scratch)
        model = hf_model.model
        layers = [adapter(config, layer) for layer in model.layers]
        embedding, head = model.embed_tokens.weight, hf_model.lm_head.weight
        if hf_model.lm_head.bias is not None:
            raise UnsupportedModelError(
                "got an LM head with a bias, expected none: this model is not supported"
            )
        return cls(
            config,
            embedding,
            layers,
            RMSNorm(model.norm.weight, config.norm_eps),
            None if head is embedding else head,
            rotary_tables(raw, config),
        ).eval()


# ----------------------------------------------------------------------------------------- adapters


def _fuse(*linears: nn.Linear) -> Projection:
    """Joins linear layers of one input into one product, outputs side by side.

    The layers' own weights become views of the product's, see `from_transformers`.
    """
    weight = torch.cat([linear.weight.detach() for linear in linears])
    start = 0
    for linear in linears:
        stop = start + linear.out_features
        linear.weight.data = weight[start:stop]
        start = stop
    biases = [linear.bias for linear in linears]
    bias = None if biases[0] is None else torch.cat([b.detach() for b in biases])
    return Projection(weight, bias)


def _share(linear: nn.Linear) -> Projection:
    """Returns a product that shares the weights of a linear layer."""
    return Projection(linear.weight, linear.bias)


def _layer(
    config: DecoderConfig, layer: Any, qkv: Projection, gate_up: Projection, qk_norm: bool
) -> Layer:
    """Fills a layer from the fused products and the rest of transformers' layer."""
    attention, mlp = layer.self_attn, layer.mlp
    norms = (
        [RMSNorm(n.weight, config.norm_eps) for n in (attention.q_norm, attention.k_norm)]
        if qk_norm
        else []
    )
    return Layer(
        RMSNorm(layer.input_layernorm.weight, config.norm_eps),
        Attention(config, qkv, _share(attention.o_proj), *norms),
        RMSNorm(layer.post_attention_layernorm.weight, config.norm_eps),
        GatedMLP(gate_up, _share(mlp.down_proj)),
    )


def _split_layer(config: DecoderConfig, layer: Any, qk_norm: bool = False) -> Layer:
    """Fills a layer from separate q, k, v, gate and up, with biases: Llama, Mistral, Qwen2."""
    attention, mlp = layer.self_attn, layer.mlp
    qkv = _fuse(attention.q_proj, attention.k_proj, attention.v_proj)
    return _layer(config, layer, qkv, _fuse(mlp.gate_proj, mlp.up_proj), qk_norm)


def _qwen3_layer(config: DecoderConfig, layer: Any) -> Layer:
    """Fills a layer as Llama's, with a norm over each query and key head before the rotation."""
    return _split_layer(config, layer, qk_norm=True)


def _phi3_layer(config: DecoderConfig, layer: Any) -> Layer:
    """Fills a layer from qkv and gate-up matrices, which come fused in the order used here."""
    qkv, gate_up = _share(layer.self_attn.qkv_proj), _share(layer.mlp.gate_up_proj)
    return _layer(config, layer, qkv, gate_up, qk_norm=False)


# The adapter of one layer, by transformers' model_type.
FAMILIES: dict[str, Callable[[DecoderConfig, Any], Layer]] = {
    "llama": _split_layer,
    "mistral": _split_layer,
    "qwen2": _split_layer,
    "qwen3": _qwen3_layer,
    "phi3": _phi3_layer,
}


def require_supported(raw: Any) -> None:
    """Raises UserError, which names what is not supported, unless this is the transformers config
    of a model that `Backbone.from_transformers` takes.

    The weights are not needed, and may still turn out not to fit.
    """
    if raw.model_type not in FAMILIES:
        raise UnsupportedModelError(
            f"got a model of type '{raw.model_type}', which is not supported: "
            f"expected one of {', '.join(FAMILIES)}"
        )
    decoder_config.require_supported(raw)
