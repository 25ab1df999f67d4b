"""Defers a module's matrices: they have a shape and a type, and are read when numbers are needed.

A deferred parameter lies on torch's meta device, so that computing with it by mistake fails, and
knows how to read itself. Nothing keeps what was read.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn


def defer(shape: torch.Size, dtype: torch.dtype, read: Callable[[], Tensor]) -> nn.Parameter:
    """Returns a parameter of this shape and type whose numbers `read` returns, anew each time."""
    parameter = nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False)
    parameter.read = read  # type: ignore[attr-defined]
    return parameter


def defer_matrices(module: nn.Module, read: Callable[[str], Tensor]) -> None:
    """Replaces the parameters of a module that are on the meta device by deferred ones.

    read: returns the numbers of a parameter by its name in the module.
    """
    for part_name, part in module.named_modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            if parameter.is_meta and not is_deferred(parameter):
                full = f"{part_name}.{name}" if part_name else name
                setattr(part, name, defer(parameter.shape, parameter.dtype, partial(read, full)))


def changed(parameter: Tensor, change: Callable[[Tensor], Tensor]) -> nn.Parameter:
    """Returns a parameter with changed numbers of the same shape, deferred if the old one is."""
    if is_deferred(parameter):
        return defer(parameter.shape, parameter.dtype, lambda: change(real(parameter)))
    return nn.Parameter(change(parameter.detach()), requires_grad=False)


def is_deferred(parameter: Tensor) -> bool:
    return hasattr(parameter, "read")


def real(parameter: Tensor) -> Tensor:
    """Returns the numbers of a parameter, which a deferred one reads."""
    if not is_deferred(parameter):
        return parameter.detach()
    found: Tensor = parameter.read()  # type: ignore[attr-defined]
    assert (found.shape, found.dtype) == (parameter.shape, parameter.dtype), found.shape
    return found


def stand_in(parameter: Tensor) -> Tensor:
    """Returns zeros of a parameter's shape and type that take no memory."""
    return torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)


@contextmanager
def replaced(module: nn.Module, by: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Gives the deferred parameters of a module the tensors that `by` makes of them, in the block.

    by: `real` to compute with them, `stand_in` to trace. Parameters that are shared stay so.
    """
    made: dict[nn.Parameter, nn.Parameter] = {}
    held: list[tuple[nn.Module, str, nn.Parameter]] = []
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False, remove_duplicate=False):
            if is_deferred(parameter):
                held.append((part, name, parameter))
    try:
        for part, name, parameter in held:
            if parameter not in made:
                made[parameter] = nn.Parameter(by(parameter), requires_grad=False)
            setattr(part, name, made[parameter])
        yield
    finally:
        for part, name, parameter in held:
            setattr(part, name, parameter)
