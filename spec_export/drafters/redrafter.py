"""Defines ReDrafter: a recurrent network over the draft, read beside the target's feature.

    s_0 = 0,  s_{k+1} = SiLU(W e(x̂_{t+1+k}) + U s_k + b)
    z = [h_t; s_{k+1}],  z ← z + SiLU(V_l z + c_l),  l = 1 … num_layers
    q(x_{t+2+k}) = softmax(H z)

x̂_{t+1} is the root, later x̂ are guesses (true tokens in training). All levels share all weights.
The drafts are searched by beams of `max_width` paths. The beam grows as a tree, so that equal
prefixes are one node, and the tree's best nodes are drafted, beams that ended early among them.

That is the authors' code: `width = "both"`, in which z has width 2d, and `head = "own"`, a matrix
H ∈ R^{V×2d}. `width = "target"` leads both to width d first: z = P · [h_t; s_{k+1}]. `head =
"shared"` takes the target's own frozen head after a norm, and after a product that leads to width
d if z is wider; it keeps the file of a small target small. All forms start as the target's own
head, which reads h_t, and V is 0.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spec_export.drafters.fields import AtLeastZero, Heads
from spec_export.drafters.sequential import SequentialConfig, SequentialDrafter
from spec_export.model.ends import TargetEnds


@dataclass(frozen=True)
class Config(SequentialConfig):
    """The settings of ReDrafter: `num_guesses` levels, a beam of `max_width` paths, `num_layers`
    residual layers in the head, their width, and whose output matrix it has.

    `width` and `head` are "target" and "shared" by default because drafters of earlier versions do
    not name them.
    """

    num_layers: AtLeastZero = 2
    width: Literal["target", "both"] = "target"
    head: Heads = "shared"


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
        E = 2 * D if config.width == "both" else D
        if config.width == "target":
            self.project_h = nn.Parameter(torch.eye(D))
            self.project_s = nn.Parameter(torch.zeros(D, D))
        self.layers = nn.ParameterList(torch.zeros(E, E) for _ in range(num_layers))
        self.biases = nn.ParameterList(torch.zeros(E) for _ in range(num_layers))
        if config.head == "own":
            own = ends.feature_scale * self.head_VD.float()
            self.own_head = nn.Parameter(F.pad(own, (0, E - D)))
        else:
            self.norm = nn.Parameter(torch.full((D,), ends.feature_scale))
            if config.width == "both":
                self.narrow = nn.Parameter(torch.cat((torch.eye(D), torch.zeros(D, D))))
        self.begin_with_zeros(D)  # the recurrent part of the first state

    def trained_head(self) -> tuple[Tensor, None] | None:
        return (self.own_head, None) if self.config.head == "own" else None

    def start(self, context_RD: Tensor) -> Tensor:
        h = self.unit(context_RD)
        return self.with_zeros(h @ self.project_h if self.config.width == "target" else h)

    def step(self, token_R: Tensor, state_RW: Tensor, level: Tensor) -> tuple[Tensor, Tensor]:
        from_h, s = state_RW.chunk(2, -1)
        s = F.silu(self.unit_embedding(token_R) @ self.w + s @ self.u + self.b)
        state = torch.cat((from_h, s), -1)
        z = from_h + s @ self.project_s if self.config.width == "target" else state
        for weight, bias in zip(self.layers, self.biases, strict=True):
            z = z + F.silu(z @ weight + bias)
        if self.config.head == "own":
            return z, state
        if self.config.width == "both":
            z = z @ self.narrow
        row = F.rms_norm(z, self.norm.shape, self.norm.to(z.dtype), self.dims.norm_eps)
        return row, state
