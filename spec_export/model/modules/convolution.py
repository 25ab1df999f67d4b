"""Defines the short causal convolution of LFM2, in place of a layer's attention.

A row's output depends on the inputs of its own node and of its nearest K - 1 ancestors. The inputs
lie in a cache of one row per slot, as keys and values do, so the nodes of a tree read those of
their own parents, and nothing has to be undone when a node is not accepted. Where the ancestors'
rows stand follows from a cache of positions: of all rows that a node attends, only its parent has
the position before its own.

Letters: N rows of one step, S cache slots, D hidden width, K width of the convolution.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from spec_export.model.modules.attention import SharedInputs, write_rows
from spec_export.model.modules.basic import Projection, frozen


def find_ancestors(
    position_cache: Tensor, position_ids: Tensor, mask: Tensor, count: int
) -> tuple[Tensor, Tensor]:
    """Returns the slots i64[count·N] of each node's nearest ancestors, all parents first, and
    bool[1,count,N,1], which says whether there is one.

    position_cache i64[1,1,S,1] holds the position of each slot's row, those of this step included;
    position_ids i64[1,N] and mask bool[1,1,N,S] are those of `Backbone.forward`. Example: slots 0
    and 2 hold positions 0 and 1, and a node of position 2 in slot 1 attends all three. Its parent
    is in slot 2, its grandparent in slot 0.
    """
    back = torch.arange(1, count + 1).view(1, -1, 1, 1)
    wanted = position_ids.view(1, 1, -1, 1) - back
    found = mask & (position_cache.view(1, 1, 1, -1) == wanted)
    return found.float().argmax(-1).view(-1), wanted >= 0


def with_ancestors(
    shared: SharedInputs, position_cache: Tensor, count: int
) -> tuple[SharedInputs, Tensor]:
    """Writes this step's positions; returns the inputs with the ancestors, and the new cache."""
    written = write_rows(position_cache, shared.position_ids.view(1, 1, -1, 1), shared)
    found = find_ancestors(written, shared.position_ids, shared.mask, count)
    return replace(shared, ancestors=found), written


class Convolution(nn.Module):
    """Computes out(c · conv(b · x)) with b, c and x from one product.

    The convolution is depthwise: each channel has K weights of its own.
    """

    bias: nn.Parameter | None

    def __init__(
        self, inputs: Projection, weight_DK: Tensor, bias_D: Tensor | None, out: Projection
    ) -> None:
        """The last of a channel's K weights is that of the row itself, as in torch's Conv1d."""
        super().__init__()
        self.inputs, self.out = inputs, out
        own_first = weight_DK.detach().t().flip(0)
        self.own = frozen(own_first[0])
        self.before = frozen(own_first[1:, None])
        self.bias = None if bias_D is None else frozen(bias_D)

    @property
    def input_product(self) -> Projection:
        """The one product that reads the layer's input."""
        return self.inputs

    @property
    def num_ancestors(self) -> int:
        """How many ancestors a row reads, K - 1."""
        return len(self.before)

    def forward(
        self, x_ND: Tensor, past: Sequence[Tensor], shared: SharedInputs
    ) -> tuple[Tensor, list[Tensor]]:
        """Maps x [N,D] and the past inputs of the convolution [1,1,S,D] to (output [N,D], them)."""
        (old,) = past
        b, c, x = self.inputs(x_ND).chunk(3, dim=-1)
        row = (b * x).view(1, 1, -1, old.shape[-1])
        cache = write_rows(old, row, shared)
        assert shared.ancestors is not None, "got a convolution without a cache of positions"
        slots, exists = shared.ancestors
        earlier = cache.index_select(2, slots).view(1, self.num_ancestors, -1, old.shape[-1])
        earlier = torch.where(exists, earlier, torch.zeros((), dtype=earlier.dtype))
        mixed = row * self.own + (earlier * self.before).sum(1, keepdim=True)
        if self.bias is not None:
            mixed = mixed + self.bias
        return self.out(c * mixed.view(-1, old.shape[-1])), [cache]
