"""The fused head loss against plain autograd: value, gradient and guesses, across chunks.

Tolerance: 1e-5 relative. Both sides are float32 and differ in the order of sums only.
"""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from spec_export.drafters import losses
from spec_export.drafters.losses import (
    Shortlist,
    draw_shortlist,
    feature_regression,
    head_cross_entropy,
    head_losses,
    position_weights,
)

R, D, V = 11, 6, 17


def inputs(seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """hidden, head, label, weight, teacher; one weight is 0."""
    torch.manual_seed(seed)
    weight_R = torch.rand(R)
    weight_R[3] = 0
    label_R = torch.randint(V, (R,))
    return torch.randn(R, D), torch.randn(V, D), label_R, weight_R, torch.randn(R, D)


def plain_losses(
    hidden_RD: Tensor, head_VD: Tensor, label_R: Tensor, s: float, target_RD: Tensor
) -> Tensor:
    """Each row's loss by the docstring of losses.py, with [R, V] logits kept for autograd."""
    log_q_RV = torch.log_softmax(hidden_RD @ head_VD.T, -1)
    p_RV = torch.softmax(target_RD @ head_VD.T, -1)
    return -(1 - s) * log_q_RV[range(len(label_R)), label_R] - s * (p_RV * log_q_RV).sum(-1)


@pytest.mark.parametrize("chunk_rows", [1, 4, R, 256])
@pytest.mark.parametrize("soft_weight", [0.0, 0.3, 1.0])
def test_head_cross_entropy_is_the_plain_computation(
    soft_weight: float, chunk_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(losses, "CHUNK_ROWS", chunk_rows)
    hidden_RD, head_VD, label_R, weight_R, teacher_RD = inputs()
    label_R[:5] = (hidden_RD[:5] @ head_VD.T).argmax(-1)  # some guesses are right
    ours, reference = (hidden_RD.clone().requires_grad_() for _ in range(2))
    loss, is_top_R = head_cross_entropy(ours, head_VD, label_R, weight_R, teacher_RD, soft_weight)
    (3 * loss).backward()  # a loss is weighed and divided on its way up
    expected = plain_losses(reference, head_VD, label_R, soft_weight, teacher_RD) @ weight_R
    (3 * expected).backward()
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(ours.grad, reference.grad, rtol=1e-5, atol=1e-6)
    assert torch.equal(is_top_R, (hidden_RD @ head_VD.T).argmax(-1) == label_R)
    assert 0 < is_top_R.sum() < R
    assert ours.grad is not None
    assert not ours.grad[3].any()


@pytest.mark.parametrize("chunk_rows", [1, 4, 256])
def test_losses_of_rows_are_the_plain_computation(
    chunk_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of one target position, neighbours or not, learn the same distribution."""
    monkeypatch.setattr(losses, "CHUNK_ROWS", chunk_rows)
    hidden_RD, head_VD, label_R, weight_R, target_RD = inputs()
    index_R = torch.tensor([0, 0, 0, 3, 3, 1, 7, 7, 7, 2, 3])
    ours, reference = (hidden_RD.clone().requires_grad_() for _ in range(2))
    got = head_losses(ours, head_VD, label_R, 0.4, target_RD, index_R)
    (got.loss_R * weight_R).sum().backward()
    expected_R = plain_losses(reference, head_VD, label_R, 0.4, target_RD[index_R])
    (expected_R * weight_R).sum().backward()
    torch.testing.assert_close(got.loss_R, expected_R, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours.grad, reference.grad, rtol=1e-4, atol=1e-6)
    q_R = torch.softmax(hidden_RD @ head_VD.T, -1)[range(R), label_R]
    torch.testing.assert_close(got.label_probability_R, q_R, rtol=1e-5, atol=1e-7)
    assert not got.label_probability_R.requires_grad


def test_no_gradient_reaches_head_weights_or_teacher() -> None:
    hidden_RD, *others = inputs()
    head_VD, label_R, weight_R, teacher_RD = others
    for tensor in (hidden_RD, head_VD, weight_R, teacher_RD):
        tensor.requires_grad_()
    loss, is_top_R = head_cross_entropy(hidden_RD, head_VD, label_R, weight_R, teacher_RD, 0.5)
    loss.backward()
    assert hidden_RD.grad is not None
    assert [tensor.grad for tensor in (head_VD, weight_R, teacher_RD)] == [None] * 3
    assert not is_top_R.requires_grad


def test_hard_labels_need_no_teacher_and_soft_ones_do() -> None:
    hidden_RD, head_VD, label_R, weight_R, teacher_RD = inputs()
    loss, _ = head_cross_entropy(hidden_RD, head_VD, label_R, weight_R)
    expected_R = plain_losses(hidden_RD, head_VD, label_R, 0.0, teacher_RD)
    torch.testing.assert_close(loss, expected_R @ weight_R)
    with pytest.raises(ValueError, match=r"soft_weight 0.5 without the target's features"):
        head_cross_entropy(hidden_RD, head_VD, label_R, weight_R, soft_weight=0.5)


def test_a_label_that_shares_the_highest_logit_is_on_top() -> None:
    hidden_RD, head_VD = torch.tensor([[0.0, 1.0]] * 3), torch.eye(2)[[0, 1, 1]]
    _, is_top_R = head_cross_entropy(hidden_RD, head_VD, torch.arange(3), torch.ones(3))
    assert is_top_R.tolist() == [False, True, True]


def test_rows_may_be_none_at_all() -> None:
    _, head_VD, label_R, weight_R, _ = inputs()
    hidden_0D = torch.zeros(0, D, requires_grad=True)
    loss, is_top_0 = head_cross_entropy(hidden_0D, head_VD, label_R[:0], weight_R[:0])
    loss.backward()
    assert (loss.item(), len(is_top_0)) == (0.0, 0)


def test_bfloat16_rows_give_a_float32_loss() -> None:
    """Logits carry 8 bits: of |logit| up to 8 that is 0.03, a percent of the loss here."""
    hidden_RD, head_VD, label_R, weight_R, teacher_RD = inputs()
    half = hidden_RD.bfloat16().requires_grad_()
    loss, _ = head_cross_entropy(
        half, head_VD.bfloat16(), label_R, weight_R, teacher_RD.bfloat16(), 0.5
    )
    loss.backward()
    expected = plain_losses(hidden_RD, head_VD, label_R, 0.5, teacher_RD) @ weight_R
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


def draw(seed: int, size: int = 8) -> Shortlist:
    """A shortlist of rows 2, 5 and 11, and of others."""
    shortlist = draw_shortlist(
        torch.tensor([5, 2, 5, 11]), V, size, torch.Generator().manual_seed(seed)
    )
    assert shortlist is not None
    return shortlist


def test_a_shortlist_has_what_is_needed_and_other_tokens_that_stand_for_the_rest() -> None:
    shortlist = draw(0)
    assert shortlist.index_S[:3].tolist() == [2, 5, 11]
    assert len(set(shortlist.index_S.tolist())) == 8
    torch.testing.assert_close(shortlist.log_weight_S.exp(), torch.tensor([1.0] * 3 + [14 / 5] * 5))
    listed = shortlist.index_S.tolist()
    places = [listed.index(v) if v in listed else losses.IGNORED for v in range(V)]
    assert shortlist.position_V.tolist() == places


def test_a_shortlist_estimates_the_sum_over_the_vocabulary() -> None:
    """The mean of 2,000 draws is within 4 standard errors of it."""
    torch.manual_seed(3)
    exp_V = torch.randn(V).exp()
    drawn = [draw(seed) for seed in range(2000)]
    sums = torch.stack([(exp_V[d.index_S] * d.log_weight_S.exp()).sum() for d in drawn])
    error = sums.std() / len(sums) ** 0.5
    assert error < 0.01 * exp_V.sum()
    assert (sums.mean() - exp_V.sum()).abs() < 4 * error


def test_more_needed_tokens_than_the_size_leave_a_quarter_to_the_others() -> None:
    shortlist = draw_shortlist(torch.arange(9), V, 8)
    assert shortlist is not None
    assert shortlist.log_weight_S.exp().tolist() == pytest.approx([1] * 9 + [4] * 2)


def test_a_shortlist_of_the_whole_vocabulary_is_none() -> None:
    assert draw_shortlist(torch.tensor([1]), V, V) is None


def test_losses_over_a_shortlist_are_those_of_its_weighted_tokens() -> None:
    """They are the plain losses of a head of the list alone, whose last column adds log w."""
    shortlist = draw(1)
    hidden_RD, head_VD, _, weight_R, target_RD = inputs()
    label_R = torch.tensor([2, 5, 11])[torch.arange(R) % 3]
    index_R = torch.arange(R)
    ours, reference = (hidden_RD.clone().requires_grad_() for _ in range(2))
    got = head_losses(ours, head_VD, label_R, 0.4, target_RD, index_R, shortlist)
    (got.loss_R * weight_R).sum().backward()
    weighted_SD = torch.cat((head_VD[shortlist.index_S], shortlist.log_weight_S[:, None]), 1)
    expected_R = plain_losses(
        F.pad(reference, (0, 1), value=1.0),
        weighted_SD,
        torch.arange(R) % 3,
        0.4,
        F.pad(target_RD, (0, 1), value=1.0),
    )
    (expected_R * weight_R).sum().backward()
    torch.testing.assert_close(got.loss_R, expected_R, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours.grad, reference.grad, rtol=1e-4, atol=1e-6)
