"""Spreads the frozen weights of a target over the processes of a run, by PyTorch's FSDP2."""

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


def shard(target: nn.Module, layers: Iterable[nn.Module], device: torch.device) -> str:
    """Leaves this process its share of the frozen weights of these layers of `target`, and says how
    much it holds.

    A layer's weights are gathered only while it runs; trained ones, an adapter's, stay whole.
    """
    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    parameters = list(target.parameters())
    before, whole = sum(p.numel() for p in parameters), {p for p in parameters if p.requires_grad}
    # not the model around the layers: fully_shard changes a module's class, by which transformers
    # recognises the model
    for layer in layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True, ignored_params=whole)
    held = sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in target.parameters())
    return (
        f"sharded: a process holds {held / before:.0%} of the target's {before / 1e6:.1f} M "
        "parameters"
    )
