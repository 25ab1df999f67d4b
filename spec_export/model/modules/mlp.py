"""Defines the dense MLPs and their activations."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spec_export.model.modules.basic import Projection

Activation = Callable[[Tensor], Tensor]


def silu(x: Tensor) -> Tensor:
    """Returns SiLU, written as x * sigmoid(x) because opset 24's Swish has no CPU kernel."""
    return x * torch.sigmoid(x)


def gelu_tanh(x: Tensor) -> Tensor:
    """Returns GELU by its approximation with tanh."""
    return F.gelu(x, approximate="tanh")


def relu_squared(x: Tensor) -> Tensor:
    """Returns the square of ReLU."""
    positive = F.relu(x)
    return positive * positive


class XIELU(nn.Module):
    """Computes the xIELU (Huang and Schlag 2024, arXiv 2411.13010), whose numbers are learned."""

    def __init__(self, alpha_p: Tensor, alpha_n: Tensor, beta: Tensor, eps: Tensor) -> None:
        """The alphas are those that softplus maps to factors on the two sides of 0."""
        super().__init__()
        self.beta, self.eps = float(beta), float(eps)
        self.right = float(F.softplus(alpha_p))
        self.left = self.beta + float(F.softplus(alpha_n))

    def forward(self, x: Tensor) -> Tensor:
        left = self.left * (torch.expm1(x.clamp(max=self.eps)) - x)
        return torch.where(x > 0, self.right * x * x, left) + self.beta * x


# By the names that transformers has for them.
ACTIVATIONS: dict[str, Activation] = {
    "silu": silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": gelu_tanh,
    "relu2": relu_squared,
}


class GatedMLP(nn.Module):
    """Computes down(activation(gate) * up), with gate and up in one product."""

    def __init__(
        self, gate_up: Projection, down: Projection, activation: Activation = silu
    ) -> None:
        super().__init__()
        self.gate_up, self.down, self.activation = gate_up, down, activation

    @property
    def input_product(self) -> Projection:
        """The one product that reads the MLP's input."""
        return self.gate_up

    def forward(self, x_ND: Tensor) -> Tensor:
        gate, up = self.gate_up(x_ND).chunk(2, dim=-1)
        return self.down(self.activation(gate) * up)


class PlainMLP(nn.Module):
    """Computes down(activation(up))."""

    def __init__(self, up: Projection, down: Projection, activation: Activation) -> None:
        super().__init__()
        self.up, self.down, self.activation = up, down, activation

    @property
    def input_product(self) -> Projection:
        """The one product that reads the MLP's input."""
        return self.up

    def forward(self, x_ND: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x_ND)))
