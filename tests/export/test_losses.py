"""The fused head loss against plain autograd: value, gradient and guesses, across chunks.

Tolerance: 1e-5 relative. Both sides are float32 and differ in the order of sums only.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from spec_export.drafters import losses
from spec_export.drafters.losses import feature_regression, head_cross_entropy, position_weights

R, D, V = 11, 6, 17


def inputs(seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """hidden, head, label, weight, teacher; one weight is 0."""
    torch.manual_seed(seed)
    weight_R = torch.rand(R)
    weight_R[3] = 0
    label_R = torch.randint(V, (R,))
    return torch.randn(R, D), torch.randn(V, D), label_R, weight_R, torch.randn(R, D)


def plain(
    hidden_RD: Tensor,
    head_VD: Tensor,
    label_R: Tensor,
    weight_R: Tensor,
    teacher_RD: Tensor,
    soft_weight: float,
) -> Tensor:
    """The formula of the docstring, with [R, V] logits kept for autograd."""
    log_q_RV = torch.log_softmax(hidden_RD @ head_VD.T, -1)
    p_RV = torch.softmax(teacher_RD @ head_VD.T, -1)
    hard_R = F.nll_loss(log_q_RV, label_R, reduction="none")
    soft_R = -(p_RV * log_q_RV).sum(-1)
    return (weight_R * ((1 - soft_weight) * hard_R + soft_weight * soft_R)).sum()


@pytest.mark.parametrize("chunk_rows", [1, 4, R, 256])
@pytest.mark.parametrize("soft_weight", [0.0, 0.3, 1.0])
def test_head_cross_entropy_is_the_plain_computation(
    soft_weight: float, chunk_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(losses, "CHUNK_ROWS", chunk_rows)
    hidden_RD, head_VD, label_R, weight_R, teacher_RD = inputs()
    ours, reference = (hidden_RD.clone().requires_grad_() for _ in range(2))
    loss, guess_R = head_cross_entropy(ours, head_VD, label_R, weight_R, teacher_RD, soft_weight)
    (3 * loss).backward()  # a loss is weighed and divided on its way up
    expected = plain(reference, head_VD, label_R, weight_R, teacher_RD, soft_weight)
    (3 * expected).backward()
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(ours.grad, reference.grad, rtol=1e-5, atol=1e-6)
    assert torch.equal(guess_R, (hidden_RD @ head_VD.T).argmax(-1))
    assert ours.grad is not None
    assert not ours.grad[3].any()


def test_no_gradient_reaches_head_weights_or_teacher() -> None:
    hidden_RD, *others = inputs()
    head_VD, label_R, weight_R, teacher_RD = others
    for tensor in (hidden_RD, head_VD, weight_R, teacher_RD):
        tensor.requires_grad_()
    loss, guess_R = head_cross_entropy(hidden_RD, head_VD, label_R, weight_R, teacher_RD, 0.5)
    loss.backward()
    assert hidden_RD.grad is not None
    assert [tensor.grad for tensor in (head_VD, weight_R, teacher_RD)] == [None] * 3
    assert not guess_R.requires_grad


def test_hard_labels_need_no_teacher_and_soft_ones_do() -> None:
    hidden_RD, head_VD, label_R, weight_R, teacher_RD = inputs()
    loss, _ = head_cross_entropy(hidden_RD, head_VD, label_R, weight_R)
    torch.testing.assert_close(loss, plain(hidden_RD, head_VD, label_R, weight_R, teacher_RD, 0.0))
    with pytest.raises(ValueError, match="got a soft_weight without the target's features"):
        head_cross_entropy(hidden_RD, head_VD, label_R, weight_R, soft_weight=0.5)


def test_rows_may_be_none_at_all() -> None:
    _, head_VD, label_R, weight_R, _ = inputs()
    hidden_0D = torch.zeros(0, D, requires_grad=True)
    loss, guess_0 = head_cross_entropy(hidden_0D, head_VD, label_R[:0], weight_R[:0])
    loss.backward()
    assert (loss.item(), len(guess_0)) == (0.0, 0)


def test_bfloat16_rows_give_a_float32_loss() -> None:
    """Logits carry 8 bits: of |logit| up to 8 that is 0.03, a percent of the loss here."""
    hidden_RD, head_VD, label_R, weight_R, teacher_RD = inputs()
    half = hidden_RD.bfloat16().requires_grad_()
    loss, _ = head_cross_entropy(
        half, head_VD.bfloat16(), label_R, weight_R, teacher_RD.bfloat16(), 0.5
    )
    loss.backward()
    expected = plain(hidden_RD, head_VD, label_R, weight_R, teacher_RD, 0.5)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=0.02, atol=0)
    assert half.grad is not None
    assert half.grad.dtype == torch.bfloat16


def test_feature_regression_is_averaged_over_the_width() -> None:
    predicted_RD = torch.tensor([[0.5, 0.0], [3.0, 0.0]])
    # SmoothL1: x²/2 below 1, |x| − 1/2 above
    row_0, row_1 = (0.5**2 / 2 + 0) / 2, (3 - 0.5 + 0) / 2
    loss = feature_regression(predicted_RD, torch.zeros(2, 2), torch.tensor([2.0, 10.0]))
    assert loss.item() == pytest.approx(2 * row_0 + 10 * row_1)
    half = feature_regression(predicted_RD.bfloat16(), torch.zeros(2, 2), torch.ones(2))
    assert half.dtype == torch.float32


def test_no_gradient_reaches_the_feature_that_is_regressed() -> None:
    """In joint training it is the target's: it must not move towards the drafter."""
    predicted_RD, feature_RD = (torch.randn(R, D, requires_grad=True) for _ in range(2))
    feature_regression(predicted_RD, feature_RD, torch.ones(R)).backward()
    assert predicted_RD.grad is not None
    assert predicted_RD.grad.any()
    assert feature_RD.grad is None


def test_position_weights_decay() -> None:
    assert position_weights(4, 0.5).tolist() == [1.0, 0.5, 0.25, 0.125]
    assert position_weights(3, 1.0).tolist() == [1.0, 1.0, 1.0]
