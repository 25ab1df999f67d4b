"""Defines ReDrafter: a recurrent network over the draft, read beside the target's feature.

    s_0 = 0,  s_{k+1} = SiLU(W e(x̂_{t+1+k}) + U s_k + b)
    z = P · [h_t; s_{k+1}],  z ← z + SiLU(V_l z + c_l),  l = 1 … num_layers
    q(x_{t+2+k}) = softmax(LM_head(norm(z)))

x̂_{t+1} is the root, later x̂ are guesses (true tokens in training). All levels share all weights.
The drafts are searched by beams of `max_width` paths. The beam grows as a tree, so that equal
prefixes are one node, and the tree's best nodes are drafted, beams that ended early among them.

The published heads own their output matrix; this one shares the target's, and P leads to its width.
It starts as the target's own head: P picks h_t, and V is 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spec_export.drafters.layers import TargetEnds
from spec_export.drafters.sequential import SequentialConfig, SequentialDrafter


@dataclass(frozen=True)
class Config(SequentialConfig):
    """The settings of ReDrafter: `num_guesses` levels, a beam of `max_width` paths, and
    `num_layers` residual layers in the head."""

    num_layers: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_layers < 0:
            raise ValueError(f"got num_layers {self.num_layers}, expected 0 or more")


class Drafter(SequentialDrafter):
    """The trained part; the state is [P's share of h_t ; s]."""

    config: Config

    def __init__(
        self, config: Config, ends: TargetEnds, draft_token_ids: Tensor | None = None
    ) -> None:
        super().__init__(config, ends, draft_token_ids)
        D, num_layers = ends.dims.hidden_size, config.num_layers
        self.w = nn.Parameter(torch.randn(D, D) * D**-0.5)
        self.u = nn.Parameter(torch.randn(D, D) * D**-0.5)
        self.b = nn.Parameter(torch.zeros(D))
        self.project_h = nn.Parameter(torch.eye(D))
        self.project_s = nn.Parameter(torch.zeros(D, D))
        self.layers = nn.ParameterList(torch.zeros(D, D) for _ in range(num_layers))
        self.biases = nn.ParameterList(torch.zeros(D) for _ in range(num_layers))
        self.norm = nn.Parameter(torch.full((D,), self.feature_scale))
        self.begin_with_zeros(D)  # the recurrent part of the first state

    def start(self, context_RD: Tensor) -> Tensor:
        return self.with_zeros(self.unit(context_RD) @ self.project_h)

    def step(self, token_R: Tensor, state_RW: Tensor, level: Tensor) -> tuple[Tensor, Tensor]:
        from_h, s = state_RW.chunk(2, -1)
        s = F.silu(self.unit_embedding(token_R) @ self.w + s @ self.u + self.b)
        z = from_h + s @ self.project_s
        for weight, bias in zip(self.layers, self.biases, strict=True):
            z = z + F.silu(z @ weight + bias)
        row = F.rms_norm(z, self.norm.shape, self.norm.to(z.dtype), self.dims.norm_eps)
        return row, torch.cat((from_h, s), -1)
