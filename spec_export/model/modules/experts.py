"""Defines the MLP of many experts; a router chooses a few of them for each row.

Letters: N rows of one step, D hidden width, E experts, I width inside an expert.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spec_export.model.modules.basic import Projection, frozen


class Experts(nn.Module):
    """Computes for each row the sum of its chosen experts' MLPs, weighted by the router.

    An expert computes down(gate · sigmoid(sharpness · gate) · (up + shift)). A row's result does
    not depend on the other rows. It is traced as one com.microsoft.MoE, which
    reads only the weights of experts that some row has chosen.
    """

    gate_up_bias: nn.Parameter | None
    down_bias: nn.Parameter | None

    def __init__(
        self,
        router: Projection,
        gate_up: Tensor,
        down: Tensor,
        gate_up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
        *,
        num_chosen: int,
        normalizes: bool = True,
        sharpness: float = 1.0,
        shift: float = 0.0,
        limit: float | None = None,
        shared: nn.Module | None = None,
        shared_gate: Projection | None = None,
    ) -> None:
        """router: logits [N,E]. gate_up [E,2I,D], whose rows 2i and 2i+1 are gate and up of one
        inner value; down [E,D,I]; the biases [E,2I] and [E,D].

        normalizes: the weights of a row's chosen experts sum to 1; else they are the softmax over
        all experts. limit: cuts gate off above it, and up on both sides. shared: an MLP that every
        row goes through, `shared_gate` the logit [N,1] of its share.
        """
        super().__init__()
        self.router = router
        self.gate_up, self.down = frozen(gate_up), frozen(down)
        self.gate_up_bias = None if gate_up_bias is None else frozen(gate_up_bias)
        self.down_bias = None if down_bias is None else frozen(down_bias)
        self.num_chosen, self.normalizes = num_chosen, normalizes
        self.sharpness, self.shift, self.limit = sharpness, shift, limit
        self.shared, self.shared_gate = shared, shared_gate

    def forward(self, x_ND: Tensor) -> Tensor:
        logits_NE = self.router(x_ND)
        is_traced = torch.onnx.is_in_onnx_export()
        y_ND = (self._traced if is_traced else self._by_expert)(x_ND, logits_NE)
        if not self.normalizes:
            chosen = logits_NE.softmax(-1, dtype=torch.float32).topk(self.num_chosen).values
            y_ND = y_ND * chosen.sum(-1, keepdim=True).to(y_ND.dtype)
        if self.shared is None:
            return y_ND
        shared_ND = self.shared(x_ND)
        if self.shared_gate is not None:
            shared_ND = shared_ND * torch.sigmoid(self.shared_gate(x_ND))
        return y_ND + shared_ND

    def _traced(self, x_ND: Tensor, logits_NE: Tensor) -> Tensor:
        """Returns the sum of the chosen experts, whose weights sum to 1, as one ONNX node."""
        attributes: dict[str, Any] = {
            "k": self.num_chosen,
            "normalize_routing_weights": 1,
            "activation_type": "swiglu",
            "swiglu_fusion": 1,  # gate and up interleaved, the only form of the CPU's kernel
            "activation_alpha": self.sharpness,
            "activation_beta": self.shift,
        }
        if self.limit is not None:
            attributes["swiglu_limit"] = self.limit
        up, down = (self.gate_up, self.gate_up_bias), (self.down, self.down_bias)
        return torch.onnx.ops.symbolic(
            "com.microsoft::MoE",
            (x_ND, logits_NE, *up, *down),
            attrs=attributes,
            dtype=x_ND.dtype,
            shape=x_ND.shape,
            version=1,
        )

    def _by_expert(self, x_ND: Tensor, logits_NE: Tensor) -> Tensor:
        """Returns the same, one expert after the other."""
        logits, expert_NK = logits_NE.float().topk(self.num_chosen)
        weight_NK = logits.softmax(-1).to(x_ND.dtype)
        y_ND = torch.zeros_like(x_ND)
        for expert in expert_NK.unique().tolist():
            row, place = torch.where(expert_NK == expert)
            gate_up = F.linear(x_ND[row], self.gate_up[expert], _of(self.gate_up_bias, expert))
            inner = self._activated(gate_up[:, ::2], gate_up[:, 1::2])
            y = F.linear(inner, self.down[expert], _of(self.down_bias, expert))
            y_ND = y_ND.index_add(0, row, y * weight_NK[row, place, None])
        return y_ND

    def _activated(self, gate: Tensor, up: Tensor) -> Tensor:
        if self.limit is not None:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return gate * torch.sigmoid(gate * self.sharpness) * (up + self.shift)


def _of(bias: Tensor | None, expert: int) -> Tensor | None:
    return None if bias is None else bias[expert]


def interleaved(gate_up: Tensor) -> Tensor:
    """Returns rows [E,2I,D], all gates and then all ups, as gate, up, gate, up."""
    E, rows, D = gate_up.shape
    return gate_up.view(E, 2, rows // 2, D).transpose(1, 2).reshape(E, rows, D)
