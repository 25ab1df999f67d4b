"""Building blocks shared by the drafters: rotary tables, a Llama-style decoder layer, the target's
frozen ends.

Knows tensors and shapes; knows nothing of any drafter's objective, of data, or of ONNX files. A
layer's attention is the caller's: a training mask is the drafter's own idea, while the traced graph
takes the backbone's attention.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spec_export import decoder
from spec_export.drafters.losses import IGNORED


@dataclass(frozen=True)
class LayerDims:
    """Sizes of a decoder layer; a drafter takes its target's."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"got {self.num_heads} heads over {self.num_kv_heads} key/value heads, "
                "expected a multiple: check the target's configuration"
            )


@dataclass(frozen=True)
class TargetEnds:
    """What a drafter borrows from its target, frozen: embedding, LM head, final norm, rotary
    tables, last layer.

    embed_VD, head_VD and final_norm_D are float32, cos and sin f32 [positions, r/2]; `last_layer`
    holds tensors by `DecoderLayer`'s parameter names, to start from.
    """

    dims: LayerDims
    embed_VD: Tensor
    head_VD: Tensor
    final_norm_D: Tensor
    cos: Tensor
    sin: Tensor
    last_layer: dict[str, Tensor]


@dataclass(frozen=True)
class Batch:
    """Right-padded sequences. token_BT i64, loss_BT bool (answer tokens), feature_BTF or None,
    length_B i64."""

    token_BT: Tensor
    loss_BT: Tensor
    feature_BTF: Tensor | None
    length_B: Tensor


class DrafterBase(nn.Module):
    """What every drafter borrows from its target, frozen and never saved.

    draft_token_ids i64[Vd] are the tokens it may guess (all by default), head_VD [Vd, D] the
    target's LM head trimmed to them, draft_index_V i64[V] the way back (IGNORED where a token is
    missing). `config` is the drafter's own Config, with `taps` and `top_k`. is_one_pass: one run
    of the graph "drafter" makes all guesses. shares_target_cache: it runs on the target's own
    layers and cache, so `export_from_target(backbone)` takes the place of `export`.
    """

    is_one_pass: ClassVar[bool] = False
    shares_target_cache: ClassVar[bool] = False
    draft_token_ids: Tensor
    draft_index_V: Tensor
    embed_VD: Tensor
    head_VD: Tensor
    cos: Tensor
    sin: Tensor

    def __init__(self, config: Any, ends: TargetEnds, draft_token_ids: Tensor | None) -> None:
        super().__init__()
        self.config, self.dims = config, ends.dims
        if draft_token_ids is None:
            draft_token_ids = torch.arange(ends.head_VD.shape[0])
        draft_index_V = torch.full((ends.embed_VD.shape[0],), IGNORED)
        draft_index_V[draft_token_ids] = torch.arange(len(draft_token_ids))
        borrowed = {
            "draft_token_ids": draft_token_ids,
            "draft_index_V": draft_index_V,
            "embed_VD": ends.embed_VD,
            "head_VD": ends.head_VD[draft_token_ids].contiguous(),
            "cos": ends.cos,
            "sin": ends.sin,
        }
        for name, tensor in borrowed.items():
            self.register_buffer(name, tensor, persistent=False)
        # the root mean square of a final feature: what stands behind the target's last norm
        self.feature_scale = ends.final_norm_D.float().square().mean().sqrt().item()

    def forward(
        self, batch: Batch, generator: torch.Generator | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The drafter's `loss`; distributed training wraps `forward` alone."""
        return self.loss(batch, generator)  # type: ignore[no-any-return, operator]

    def labels(self, batch: Batch, num_guesses: int) -> Tensor:
        """Draft-vocabulary labels i64[B, T-1, K]: guess k of row t (k from 0) is token t + 2 + k.

        IGNORED past the end, on tokens that carry no loss, and outside the draft vocabulary.
        """
        label_BT = torch.where(batch.loss_BT, self.draft_index_V[batch.token_BT], IGNORED)
        ahead_BT = F.pad(label_BT, (0, num_guesses), value=IGNORED)[:, 2:]
        return ahead_BT.unfold(1, num_guesses, 1)[:, : label_BT.shape[1] - 1]

    def top_tokens(self, logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
        """Best tokens of logits [..., Vd]: ids i64 and log-probabilities f32, both [..., top_k].
        Traced into graphs as it is."""
        top = torch.log_softmax(logits.float(), -1).topk(top_k, dim=-1)
        return self.draft_token_ids[top.indices], top.values

    @torch.no_grad()
    def top_guesses(
        self, rows: Tensor, output_rows: Callable[[Tensor], Tensor], top_k: int
    ) -> tuple[Tensor, Tensor]:
        """Best tokens of hidden `rows` [..., D] through `output_rows` and the shared head: ids i64
        and log-probabilities f32, both [..., top_k]."""
        ids, log_probs = [], []
        # the logits of all rows at once would be gigabytes
        for chunk in rows.flatten(0, -2).split(4096):
            out = output_rows(chunk)
            chosen, values = self.top_tokens(out @ self.head_VD.to(out.dtype).T, top_k)
            ids.append(chosen)
            log_probs.append(values)
        shape = (*rows.shape[:-1], top_k)
        return torch.cat(ids).view(shape), torch.cat(log_probs).view(shape)


def fusion(num_inputs: int, width: int) -> nn.Parameter:
    """fc over concatenated inputs of a like scale, f32[num_inputs * width, width]: at first it
    hands the first one on, with a little of the others."""
    weight = torch.randn(num_inputs, width, width) * 0.3 * width**-0.5
    weight[0] = torch.eye(width)
    return nn.Parameter(weight.flatten(0, 1))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Half-rotation RoPE of x [..., heads, Dh] by cos, sin [..., r/2] of each row's position;
    columns past r pass."""
    r = 2 * cos.shape[-1]
    first, second = x[..., :r].chunk(2, dim=-1)
    cos, sin = cos[..., None, :].to(x.dtype), sin[..., None, :].to(x.dtype)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat((*turned, x[..., r:]), dim=-1)


class DecoderLayer(nn.Module):
    """Pre-norm attention and SwiGLU with the target's sizes; weights stored [in, out] as the traced
    graph wants them."""

    def __init__(self, dims: LayerDims) -> None:
        super().__init__()
        self.dims = dims
        D, qkv = dims.hidden_size, (dims.num_heads + 2 * dims.num_kv_heads) * dims.head_dim
        self.attention_norm = nn.Parameter(torch.ones(D))
        self.qkv = nn.Parameter(torch.empty(D, qkv))
        self.out = nn.Parameter(torch.empty(dims.num_heads * dims.head_dim, D))
        self.mlp_norm = nn.Parameter(torch.ones(D))
        self.gate_up = nn.Parameter(torch.empty(D, 2 * dims.intermediate_size))
        self.down = nn.Parameter(torch.empty(dims.intermediate_size, D))
        for weight in (self.qkv, self.out, self.gate_up, self.down):
            nn.init.normal_(weight, std=weight.shape[0] ** -0.5)

    def load_target_layer(self, tensors: dict[str, Tensor]) -> None:
        """Start from one of the target's own layers (names as this module's, biases left out)."""
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                parameter.copy_(tensors[name])

    def start_as_identity(self) -> None:
        """Its rows pass at first. A layer of the target would not let them: it adds to a residual
        stream some thirty times stronger than what a drafter feeds it."""
        nn.init.zeros_(self.out)
        nn.init.zeros_(self.down)

    def project_qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q [..., H, Dh], k and v [..., G, Dh] of x [..., D], before rotary embedding."""
        d = self.dims
        normed = F.rms_norm(x, (d.hidden_size,), self.attention_norm, d.norm_eps)
        heads = (normed @ self.qkv).unflatten(-1, (-1, d.head_dim))
        q, k, v = heads.split((d.num_heads, d.num_kv_heads, d.num_kv_heads), dim=-2)
        return q, k, v

    def causal(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """The layer over whole sequences x [B, T, D]: row t at position t, seeing rows 0 … t. cos
        and sin are the whole tables."""
        q, k, v = self.project_qkv(x)
        cos, sin = cos[: x.shape[1]], sin[: x.shape[1]]
        q, k, v = rotate(q, cos, sin), rotate(k, cos, sin), v.to(q.dtype)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.finish(x, attended.transpose(1, 2).flatten(-2))

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """The rest of the layer: x [..., D] plus the projected heads [..., H*Dh], then the MLP."""
        x = x + attended @ self.out
        normed = F.rms_norm(x, (self.dims.hidden_size,), self.mlp_norm, self.dims.norm_eps)
        gate, up = (normed @ self.gate_up).chunk(2, dim=-1)
        return x + (gate * torch.sigmoid(gate) * up) @ self.down


def as_traceable(layer: DecoderLayer, config: decoder.DecoderConfig) -> decoder.Layer:
    """The same weights as a layer of the backbone's kind, whose attention reads and writes a
    cache."""
    d = layer.dims
    return decoder.Layer(
        decoder.RMSNorm(layer.attention_norm, d.norm_eps),
        decoder.Attention(
            config, decoder.Projection(layer.qkv.t()), decoder.Projection(layer.out.t())
        ),
        decoder.RMSNorm(layer.mlp_norm, d.norm_eps),
        decoder.GatedMLP(decoder.Projection(layer.gate_up.t()), decoder.Projection(layer.down.t())),
    )
