"""Compares a drafter's loss with a formula written out."""

from collections.abc import Callable
from typing import Any

import torch
from tiny_backbone import HEAD_DIM, HEADS, VOCAB
from torch import Tensor

from spec_export.drafters.layers import Batch


def make_batch(lengths: tuple[int, ...] = (8,), width: int = HEADS * HEAD_DIM) -> Batch:
    """Returns random tokens and features; every token is an answer's."""
    torch.manual_seed(2)
    B, T, length_B = len(lengths), max(lengths), torch.tensor(lengths)
    is_token_BT = torch.arange(T) < length_B[:, None]
    token_BT = torch.where(is_token_BT, torch.randint(VOCAB, (B, T)), 0)
    return Batch(token_BT, is_token_BT, torch.randn(B, T, width), length_B)


def check_loss_and_gradient(
    drafter: Any,
    batch: Batch,
    reference: Callable[[Any, Batch], tuple[Tensor, list[int], list[int]]],
    atol: float = 1e-5,
    empty: tuple[str, ...] = (),
) -> None:
    """`reference` returns loss, correct_K and count_K; some guess 0 must be right.

    Every parameter must have a gradient that is not zero, but those named `empty`, which have no
    element.
    """
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
