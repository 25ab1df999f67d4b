"""Defines Hydra: K heads, each fed with the embeddings of all guesses before its own.

Head k, from 0, reads the final feature and the path so far; x̂ are guesses (true tokens in
training):

    c = [h_t; e(x_{t+1}); e(x̂_{t+2}); …; e(x̂_{t+1+k})]
    z = W_k c + SiLU(A_k c),   W_k and A_k ∈ R^{(k+2)d×d}
    z ← z + SiLU(V_{k,l} z),  l = 2 … num_layers
    q(x_{t+2+k}) = softmax(LM_head(norm(z)))

As in the authors' code the first of num_layers blocks leads c to width d.

All heads start as the target's own head: W_k picks h_t, and A and V are 0. Hydra++ has
`prefix_layer = true` (h_t first goes through one causal decoder layer with its own cache),
`num_layers = 4` and `soft_weight = 1` (the target's distribution as the label). The authors' heads
own their output matrices and have biases; these share the target's and have none.
"""

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spec_export.drafters.fields import AtLeastOne
from spec_export.drafters.layers import Batch, CachedGraph, DecoderLayer, export_cached
from spec_export.drafters.sequential import SequentialConfig, SequentialDrafter
from spec_export.model import decoder
from spec_export.model.ends import TargetEnds


@dataclass(frozen=True)
class Config(SequentialConfig):
    """The settings of Hydra: `num_guesses` heads of `num_layers` blocks each, and Hydra++'s
    `prefix_layer`."""

    num_layers: AtLeastOne = 1
    prefix_layer: bool = False


class _Head(nn.Module):
    """The weights of head k: the first block, the blocks V, and the norm before the LM head.

    `first` is W_k, and right of it A_k.
    """

    def __init__(self, k: int, config: Config, D: int, scale: float) -> None:
        super().__init__()
        first = torch.cat((torch.eye(D), torch.zeros((k + 1) * D, D)))
        self.first = nn.Parameter(torch.cat((first, torch.zeros_like(first)), 1))
        self.layers = nn.ParameterList(torch.zeros(D, D) for _ in range(config.num_layers - 1))
        self.norm = nn.Parameter(torch.full((D,), scale))


def _first_block(product: Tensor) -> Tensor:
    """Returns z [..., D] of the first product c · [W_k, A_k], [..., 2D]."""
    residual, inner = product.chunk(2, -1)
    return residual + F.silu(inner)


class Drafter(SequentialDrafter):
    """The trained part; see DrafterBase for what it borrows."""

    config: Config
    heads: Any  # nn.ModuleList of _Head; mypy sees plain Modules in it

    def __init__(
        self, config: Config, ends: TargetEnds, draft_token_ids: Tensor | None = None
    ) -> None:
        super().__init__(config, ends, draft_token_ids)
        D = ends.dims.hidden_size
        self.heads = nn.ModuleList(
            _Head(k, config, D, ends.feature_scale) for k in range(config.num_guesses)
        )
        if config.prefix_layer:
            self.prefix = DecoderLayer(ends.dims)
            self.prefix.load_target_layer(ends.last_layer)
            self.prefix.start_as_identity()

    def context(self, batch: Batch) -> Tensor:
        feature_BRD = super().context(batch)
        if not self.config.prefix_layer:
            return feature_BRD
        return self.prefix.causal(self.unit(feature_BRD), self.cos, self.sin)

    def path_rows(self, context_RD: Tensor, token_RK: Tensor) -> Tensor:
        """Computes the heads by the formula; `_StepNetwork` does the same level by level."""
        chunks = [self.unit(context_RD), *self.unit_embedding(token_RK).unbind(1)]
        rows = []
        for k, head in enumerate(self.heads):
            z = _first_block(torch.cat(chunks[: k + 2], -1) @ head.first)
            for weight in head.layers:
                z = z + F.silu(z @ weight)
            rows.append(F.rms_norm(z, head.norm.shape, head.norm.to(z.dtype), self.dims.norm_eps))
        return torch.stack(rows, 1)

    # ---- export ----------------------------------------------------------------------------------

    def traceable(self) -> tuple[Any, Any]:
        graph = _StepNetwork(self)
        return graph.start, graph

    def export(self, target: decoder.DecoderConfig) -> dict[str, ir.Model]:
        """Returns the graphs of `SequentialDrafter.export`.

        With a prefix layer "start" has a cache, in the contiguous form: input_ids i64[1,N] (unused,
        but every graph with a cache has them), features f32[1,N,D], position_ids, mask, logit_rows
        i64[M], the cache inputs -> state f32[M,W] and the caches.
        """
        graphs = super().export(target)
        if self.config.prefix_layer:
            config = replace(target, num_layers=1, taps=(), layers=())
            graphs["start"] = export_cached(
                _PrefixStartGraph(self, config),
                config,
                self.head_VD.dtype,
                ["state"],
                "start",
                feature_width=self.dims.hidden_size,
            )
        return graphs


class _StartNetwork(nn.Module):
    """Computes h_t's part of every head's first product of width E: [R, D] -> [R, K·E]."""

    def __init__(self, drafter: Drafter) -> None:
        super().__init__()
        D = drafter.dims.hidden_size
        weights = torch.cat([head.first[:D].detach() for head in drafter.heads], 1)
        self.project = decoder.Projection(weights.t())
        self.unit = drafter.unit

    def forward(self, context_RD: Tensor) -> Tensor:
        return self.project(self.unit(context_RD))


class _StepNetwork(nn.Module):
    """Computes the heads level by level.

    The state holds each head's first product, summed up so far: a token adds its e · W once, for
    all heads that will read it. Block (j, k ≥ j) of the first products serves level
    j and head k. One product computes all blocks, and the level picks its own: to gather weights by
    level would move more memory, and could not be quantised. Heads before the level get an
    arbitrary block, because they are not read again.
    """

    pick_KK: Tensor

    def __init__(self, drafter: Drafter) -> None:
        super().__init__()
        heads: list[_Head] = list(drafter.heads)
        self.D, self.K, self.eps = drafter.dims.hidden_size, len(heads), drafter.dims.norm_eps
        D, K = self.D, self.K
        self.E = heads[0].first.shape[1]  # columns of a first product
        self.start = _StartNetwork(drafter)
        self.embed = drafter.unit_embedding
        rows = [slice((j + 1) * D, (j + 2) * D) for j in range(K)]  # token j's rows of `first`
        blocks = [heads[k].first[rows[j]].detach() for j in range(K) for k in range(j, K)]
        self.project = decoder.Projection(torch.cat(blocks, 1).t())
        before = [0, *accumulate(range(K, 0, -1))]  # number of blocks of the levels before j
        pick = [[before[j] + max(k - j, 0) for k in range(K)] for j in range(K)]
        self.register_buffer("pick_KK", torch.tensor(pick))
        tables = zip(*(head.layers for head in heads), strict=True)
        self.layers = nn.ParameterList(
            torch.stack([weight.detach().flatten() for weight in table]) for table in tables
        )
        self.norm_KD = nn.Parameter(torch.stack([head.norm.detach() for head in heads]))

    def forward(self, token_N: Tensor, state_NW: Tensor, level: Tensor) -> tuple[Tensor, Tensor]:
        D, K, E = self.D, self.K, self.E
        parts = self.project(self.embed(token_N)).view(-1, K * (K + 1) // 2, E)
        pick_K = self.pick_KK.index_select(0, level).view(-1)
        state_NKE = state_NW.view(-1, K, E) + parts.index_select(1, pick_K)
        z = _first_block(state_NKE.index_select(1, level).view(-1, E))
        for table in self.layers:
            z = z + F.silu(z @ table.index_select(0, level).view(D, D))
        norm_D = self.norm_KD.index_select(0, level).view(-1)
        return F.rms_norm(z, norm_D.shape, norm_D, self.eps), state_NKE.view(-1, K * E)


class _PrefixStartGraph(CachedGraph):
    """The graph "start" with a prefix layer: the layer over a cache, then `_StartNetwork`."""

    def __init__(self, drafter: Drafter, config: decoder.DecoderConfig) -> None:
        super().__init__(drafter, [drafter.prefix], config)
        self.start = _StartNetwork(drafter)

    def forward(self, token_1N: Tensor, feature_1ND: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        rows, caches = self.run_layers(self.drafter.unit(feature_1ND), inputs)
        return (self.start(rows.view(-1, self.drafter.dims.hidden_size)), *caches)
