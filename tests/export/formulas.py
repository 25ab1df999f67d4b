"""A drafter's loss against a formula written out."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from spec_export.drafters.layers import Batch


def check_loss_and_gradient(
    drafter: Any,
    batch: Batch,
    reference: Callable[[Any, Batch], tuple[Tensor, list[int], list[int]]],
    atol: float = 1e-5,
    empty: tuple[str, ...] = (),
) -> None:
    """`reference` gives loss, correct_K and count_K; some guess 0 is right. Every parameter has a
    gradient that is not zero, but those named `empty`, which have no element."""
    loss, counts = drafter.loss(batch)
    loss.backward()
    gradients = {name: p.grad for name, p in drafter.named_parameters()}
    drafter.zero_grad(set_to_none=True)
    expected, correct_K, count_K = reference(drafter, batch)
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    assert counts["count_K"].tolist() == count_K
    assert counts["correct_K"].tolist() == correct_K
    assert correct_K[0] >= 1
    for name, parameter in drafter.named_parameters():
        got = gradients[name]
        assert got is not None, name
        assert got.any() or (name in empty and not got.numel()), name
        torch.testing.assert_close(got, parameter.grad, rtol=1e-3, atol=atol)
