"""Defines what EAGLE-3 and DFlash make of a row's taps: norms, if they have some, and one product.

The weights are a drafter's, but the target's graph runs them, once for each of its rows: a drafter
would repeat the product for every node of a tree, and taps are several times as wide.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Fusion(nn.Module):
    """Maps the states [..., Dt] of the layers `taps` to one row [..., D], in float32.

    norms: "each" norms every tap by itself, "all" their concatenation, "none" neither. out_norm:
    the row is normed too.
    """

    def __init__(
        self,
        taps: Sequence[int],
        width: int,
        out_width: int,
        norms: str,
        eps: float,
        out_norm: bool = False,
    ) -> None:
        super().__init__()
        self.taps, self.eps = tuple(taps), eps
        m = len(self.taps)
        self.norm = None
        if norms != "none":
            self.norm = nn.Parameter(torch.ones((m, width) if norms == "each" else m * width))
        self.fc = nn.Parameter(torch.randn(m * width, out_width) * (m * width) ** -0.5)
        if width == out_width:  # before training the last tap passes, with a little of the others
            with torch.no_grad():
                self.fc.mul_(0.3).view(m, width, width)[-1] = torch.eye(width)
        self.out_norm = nn.Parameter(torch.ones(out_width)) if out_norm else None

    def forward(self, states: Sequence[Tensor]) -> Tensor:
        if self.norm is not None and self.norm.dim() == 2:
            norms = self.norm.unbind()
            states = [self._normed(x, norm) for x, norm in zip(states, norms, strict=True)]
        x = torch.cat([x.float() for x in states], -1)
        if self.norm is not None and self.norm.dim() == 1:
            x = self._normed(x, self.norm)
        x = x @ self.fc
        return x if self.out_norm is None else self._normed(x, self.out_norm)

    def _normed(self, x: Tensor, gain: Tensor) -> Tensor:
        return F.rms_norm(x.float(), gain.shape, gain, self.eps)
