"""Defines semi-autoregressive drafting: a tiny language model over the draft tokens, beside the
target's feature, which is read once a step.

    q(d_{j+1} | w_≤i, d_≤j) = q0(d_{j+1} | h_p(w_≤i), h_q(d_≤j)),  j ≥ 1

d_1 is the root w_{i+1}, so that guess k, from 0, has j = k + 1. `kind` chooses h_q:

- *fixed_attention*: Σ_l α_l MLP(e(d_l)) / Σ_l α_l, α_l = sigmoid(a_l) learnable, MLP two layers of
  d/2 neurons with SiLU after both; width d/2. α starts ascending, α_l = l / (K + 1), because the
  newest token says most about the next one, and learns `alpha_rate` times as fast as the rest:
  at their rate it would still be where it started at the end of a run.
- *lstm*: two layers of d/2 units, their last output; *rnn*: one layer of d/2 tanh units.
- *transformer*: `layers` decoder layers over d_≤j, width d; with none of them h_q = e(d_j).

The head q0 is W3ᵀ SiLU([W_pᵀ h_p ; W_qᵀ h_q]) + b3 with W_p ∈ R^{d×1024}, W3 ∈ R^{2048×V}
(`head = "own"`). `head = "shared"` is not the paper's: W3 leads back to width d, then come a norm
and the target's own frozen head, which keeps the file of a small target small.

    L = Σ_k mean[−log q0(token of guess k)]

This is the paper's mean over all tokens but for the weight of the last few. With a frozen target it
is the paper's "separate" training.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor, nn
from torch.nn import functional as F

from spec_export.drafters.fields import AtLeastOne, Heads
from spec_export.drafters.layers import DecoderLayer, rotate
from spec_export.drafters.sequential import SequentialConfig, SequentialDrafter
from spec_export.model.ends import TargetEnds
from spec_runtime.errors import UserError


@dataclass(frozen=True)
class Config(SequentialConfig):
    """The settings: the `kind` of h_q, its `layers` if it is a transformer, whose `head` q0 is,
    `head_width` columns each of W_p and W_q, and α's learning rate as a multiple of the others'."""

    num_guesses: AtLeastOne = 3
    kind: Literal["fixed_attention", "lstm", "rnn", "transformer"] = "fixed_attention"
    layers: Annotated[int, Ge(0), Le(6)] = 1
    head: Heads = "own"
    head_width: AtLeastOne = 1024
    alpha_rate: Annotated[float, Gt(0)] = 20.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head == "own" and self.soft_weight:
            raise UserError("got a soft_weight, expected 0: a head of its own learns hard labels")


def _weight(*shape: int) -> nn.Parameter:
    """Returns a random matrix that keeps the variance of its input."""
    return nn.Parameter(torch.randn(shape) * shape[0] ** -0.5)


class _FixedAttention(nn.Module):
    """h_q by fixed attention; its state is Σ_l α_l MLP(e(d_l)).

    As for every kind of h_q, `forward` takes embeddings x [R, D], the state [R, state_width] and
    the level i64[1]; it returns h_q [R, width] and the next state.
    """

    def __init__(self, D: int, num_guesses: int) -> None:
        super().__init__()
        self.width = self.state_width = D // 2
        self.first, self.second = _weight(D, self.width), _weight(self.width, self.width)
        self.bias = nn.Parameter(torch.zeros(2, self.width))
        ascending_K = torch.arange(1, num_guesses + 1) / (num_guesses + 1)
        self.alpha = nn.Parameter(ascending_K.logit())  # before the sigmoid

    def forward(self, x: Tensor, state: Tensor, level: Tensor) -> tuple[Tensor, Tensor]:
        alpha_K = torch.sigmoid(self.alpha)
        x = F.silu(x @ self.first + self.bias[0])
        x = F.silu(x @ self.second + self.bias[1])
        state = state + alpha_K.index_select(0, level) * x
        return state / alpha_K.cumsum(0).index_select(0, level), state


class _Rnn(nn.Module):
    """h_q by a recurrent network; its state is the units' last output."""

    def __init__(self, D: int) -> None:
        super().__init__()
        self.width = self.state_width = D // 2
        self.w, self.u = _weight(D, self.width), _weight(self.width, self.width)
        self.bias = nn.Parameter(torch.zeros(self.width))

    def forward(self, x: Tensor, state: Tensor, level: Tensor) -> tuple[Tensor, Tensor]:
        state = torch.tanh(x @ self.w + state @ self.u + self.bias)
        return state, state


class _Lstm(nn.Module):
    """h_q by an LSTM; its state is the output and the cell of each layer.

    The gates are in the order input, forget, cell, output.
    """

    def __init__(self, D: int, num_layers: int = 2) -> None:
        super().__init__()
        self.width, self.state_width = D // 2, 2 * num_layers * (D // 2)
        widths = [D] + [self.width] * (num_layers - 1)
        self.w = nn.ParameterList(_weight(width, 4 * self.width) for width in widths)
        self.u = nn.ParameterList(_weight(self.width, 4 * self.width) for _ in widths)
        self.bias = nn.ParameterList(torch.zeros(4 * self.width) for _ in widths)

    def forward(self, x: Tensor, state: Tensor, level: Tensor) -> tuple[Tensor, Tensor]:
        parts = state.split(self.width, -1)
        after: list[Tensor] = []
        for w, u, bias, h, c in zip(
            self.w, self.u, self.bias, parts[::2], parts[1::2], strict=True
        ):
            i, f, g, o = (x @ w + h @ u + bias).chunk(4, -1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            x = torch.sigmoid(o) * torch.tanh(c)
            after += (x, c)
        return x, torch.cat(after, -1)


class _Transformer(nn.Module):
    """h_q by decoder layers; its state is the keys and values of the path, [K, 2, G, Dh] a layer.

    A token's position is its level. Before training a layer passes its input on unchanged, as
    `DecoderLayer.start_as_identity` explains.
    """

    layers: Any  # nn.ModuleList of DecoderLayer; mypy sees plain Modules in it
    cos: Tensor
    sin: Tensor
    level_K: Tensor

    def __init__(self, num_layers: int, num_guesses: int, ends: TargetEnds) -> None:
        super().__init__()
        d = ends.dims
        self.width = d.hidden_size
        self.shape = (-1, num_layers, num_guesses, 2, d.num_kv_heads, d.head_dim)
        self.state_width = num_layers * num_guesses * 2 * d.num_kv_heads * d.head_dim
        self.layers = nn.ModuleList(DecoderLayer(d) for _ in range(num_layers))
        for layer in self.layers:
            layer.load_target_layer(ends.last_layer)
            layer.start_as_identity()
        self.register_buffer("cos", ends.cos[:num_guesses].clone(), persistent=False)
        self.register_buffer("sin", ends.sin[:num_guesses].clone(), persistent=False)
        self.register_buffer("level_K", torch.arange(num_guesses), persistent=False)

    def forward(self, x: Tensor, state: Tensor, level: Tensor) -> tuple[Tensor, Tensor]:
        if not len(self.layers):
            return x, state
        cos, sin = self.cos.index_select(0, level), self.sin.index_select(0, level)
        caches: list[Tensor] = []
        for i, layer in enumerate(self.layers):
            q, k, v = layer.project_qkv(x)
            G, Dh = k.shape[-2:]
            new = torch.stack((rotate(k, cos, sin), v), 1)[:, None]
            is_new_K = (self.level_K == level)[:, None, None, None]
            kv = torch.where(is_new_K, new, state.view(self.shape)[:, i].to(new.dtype))
            caches.append(kv)
            keys, values = kv.permute(2, 0, 3, 1, 4).unbind(0)  # [R, G, K, Dh] each
            q = rotate(q, cos, sin).unflatten(1, (G, -1)) * Dh**-0.5
            score = (q @ keys.transpose(-1, -2)).float()
            score = score.masked_fill(self.level_K > level, torch.finfo(score.dtype).min)
            attended = score.softmax(-1).to(values.dtype) @ values
            x = layer.finish(x, attended.flatten(1))
        return x, torch.stack(caches, 1).flatten(1)


class Drafter(SequentialDrafter):
    """The trained part; the state is [W_pᵀ h_p ; h_q's own state]."""

    config: Config

    def __init__(
        self, config: Config, ends: TargetEnds, draft_token_ids: Tensor | None = None
    ) -> None:
        super().__init__(config, ends, draft_token_ids)
        D, K, width = ends.dims.hidden_size, config.num_guesses, config.head_width
        self.h_q: _FixedAttention | _Lstm | _Rnn | _Transformer
        if config.kind == "fixed_attention":
            self.h_q = _FixedAttention(D, K)
        elif config.kind == "lstm":
            self.h_q = _Lstm(D)
        elif config.kind == "rnn":
            self.h_q = _Rnn(D)
        else:
            self.h_q = _Transformer(config.layers, K, ends)
        self.begin_with_zeros(self.h_q.state_width)
        self.w_p, self.w_q = _weight(D, width), _weight(self.h_q.width, width)
        if config.head == "own":
            V = len(self.draft_token_ids)
            self.w3 = nn.Parameter(torch.randn(V, 2 * width) * (2 * width) ** -0.5)
            self.b3 = nn.Parameter(torch.zeros(V))
        else:
            self.w3 = _weight(2 * width, D)
            self.norm = nn.Parameter(ends.final_norm_D.float().clone())

    def trained_head(self) -> tuple[Tensor, Tensor] | None:
        return (self.w3, self.b3) if self.config.head == "own" else None

    def trained_groups(self) -> list[tuple[float, list[nn.Parameter]]]:
        if not isinstance(self.h_q, _FixedAttention):
            return super().trained_groups()
        alpha = self.h_q.alpha
        others = [p for p in self.parameters() if p.requires_grad and p is not alpha]
        return [(1.0, others), (self.config.alpha_rate, [alpha])]

    def start(self, context_RD: Tensor) -> Tensor:
        return self.with_zeros(self.unit(context_RD) @ self.w_p)

    def step(self, token_R: Tensor, state_RW: Tensor, level: Tensor) -> tuple[Tensor, Tensor]:
        p, state = state_RW.split((self.config.head_width, self.h_q.state_width), -1)
        h_q, state = self.h_q(self.unit_embedding(token_R), state, level)
        row = F.silu(torch.cat((p, h_q @ self.w_q), -1))
        if self.config.head == "shared":
            y = row @ self.w3
            row = F.rms_norm(y, self.norm.shape, self.norm.to(y.dtype), self.dims.norm_eps)
        return row, torch.cat((p, state), -1)
