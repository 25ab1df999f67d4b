"""Keeps an exponential moving average of the weights, which validates and drafts better than they.

    average_n = decay_n · average_(n−1) + (1 − decay_n) · weights_n

decay_n = min(decay, (1 + n) / (10 + n)) for step n, counted from 0, so that the random weights of
the beginning are soon forgotten and short runs are averaged over their last part: 0.1 at the first
step, 0.5 at step 8, 0.92 at step 100.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from spec_export.training import interruption


class WeightAverage:
    """The average of a module's trained weights, and the switch between the two.

    The average is as long in memory as the weights; an update is one pass over both.
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.decay = decay
        self._weights = {n: p for n, p in module.named_parameters() if p.requires_grad}
        # By the weight's name. While the average is in use, these tensors hold the raw weights.
        self.tensors = {name: p.detach().clone() for name, p in self._weights.items()}
        self._is_in_use = False

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Takes in the weights as optimiser step `step`, counted from 0, has left them."""
        assert not self._is_in_use, "the average would be averaged"
        decay = min(self.decay, (1 + step) / (10 + step))
        weights = [weight.detach() for weight in self._weights.values()]
        torch._foreach_lerp_([*self.tensors.values()], weights, 1 - decay)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Puts the average in the weights' place for the length of the block."""
        try:
            self._switch(True)
            yield
        finally:
            self.put_back()

    def put_back(self) -> None:
        """Puts the raw weights back in their place, if the average is there."""
        self._switch(False)

    @torch.no_grad()
    def _switch(self, to_average: bool) -> None:
        """Exchanges weights and average, unless they are where they should be already."""
        with interruption.delayed():
            if self._is_in_use == to_average:
                return
            for name, weight in self._weights.items():
                other = self.tensors[name].clone()
                self.tensors[name].copy_(weight)
                weight.copy_(other)
            self._is_in_use = to_average
