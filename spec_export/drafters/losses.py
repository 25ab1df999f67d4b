"""Computes the losses of guesses: on hard labels, on the target's distribution, and on features.

p is the target's distribution, q the drafter's; R counts rows with a label, of which a row's is y.
Through a head the loss of a row is

    −(1−s) log q(y) − s Σ_v p(v) log q(v),    s = soft_weight.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from spec_runtime.errors import UserError

IGNORED = -100  # label of a row that carries no loss
CHUNK_ROWS = 256  # logits of a chunk stay in cache: 256 rows of an 8 k vocabulary are 8 MB


def position_weights(count: int, decay: float) -> Tensor:
    """Returns λ_k = decay^k for k = 0 … count-1, f32[count] (Medusa and ParallelSpec use 0.8)."""
    return decay ** torch.arange(count, dtype=torch.float32)


class Shortlist(NamedTuple):
    """Some tokens of the draft vocabulary that stand for all of it in one training step.

    index_S i64[S] are their rows of the head. A token that was drawn stands for w tokens like it,
    so that log_weight_S f32[S], log w, is added to its logit; the tokens that the step needs stand
    for themselves, log w = 0. The sum of e^logit over the list is then an unbiased estimate of that
    over the vocabulary. position_V i64[Vd] leads from a row of the head to its place in the list,
    IGNORED for tokens that are not in it.
    """

    index_S: Tensor
    log_weight_S: Tensor
    position_V: Tensor


def draw_shortlist(
    needed: Tensor, vocab_size: int, size: int, generator: torch.Generator | None = None
) -> Shortlist | None:
    """Returns the tokens `needed`, rows i64 of the head in any order, and others drawn at random
    with equal chances, `size` in all; None if that is the whole vocabulary.

    At least a quarter of `size` is drawn, however many are needed: the other tokens have a share of
    the probability, too.
    """
    is_needed_V = torch.zeros(vocab_size, dtype=torch.bool, device=needed.device)
    is_needed_V[needed] = True
    needed_rows, others = (mask.nonzero()[:, 0] for mask in (is_needed_V, ~is_needed_V))
    count = max(size - len(needed_rows), size // 4, 1)
    if count >= len(others):
        return None
    drawn = others[torch.randperm(len(others), generator=generator)[:count].to(others.device)]
    index_S = torch.cat((needed_rows, drawn))
    log_weight_S = torch.zeros(len(index_S), device=needed.device)
    log_weight_S[len(needed_rows) :] = math.log(len(others) / count)
    position_V = torch.full((vocab_size,), IGNORED, device=needed.device)
    position_V[index_S] = torch.arange(len(index_S), device=needed.device)
    return Shortlist(index_S, log_weight_S, position_V)


class HeadLosses(NamedTuple):
    """Each row's loss f32[R], and without a gradient: q(y) f32[R], and whether no token has a
    higher logit than the label, bool[R]."""

    loss_R: Tensor
    label_probability_R: Tensor
    is_top_R: Tensor


class _HeadLosses(torch.autograd.Function):
    """Computes `head_losses` and their gradients chunk by chunk in the forward pass.

    The logits are in the processor's cache then: to keep [R, V] logits for a backward pass would
    cost more than both matrix products. At a row's logits the gradient is
    q − s · p − (1 − s) · onehot(y).
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_RD: Tensor,
        head_VD: Tensor,
        label_R: Tensor,
        soft_weight: float,
        target_ND: Tensor | None,
        target_index_R: Tensor | None,
        log_weight_V: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        gradient_RD = torch.empty_like(hidden_RD)
        loss_R, probability_R = (
            hidden_RD.new_empty(len(hidden_RD), dtype=torch.float32) for _ in range(2)
        )
        is_top_R = torch.empty_like(label_R, dtype=torch.bool)
        for start in range(0, len(hidden_RD), CHUNK_ROWS):
            rows = slice(start, start + CHUNK_ROWS)
            logits = _logits(hidden_RD[rows], head_VD, log_weight_V)
            p = None
            if target_ND is not None and target_index_R is not None:
                p = _target_distribution(target_ND, target_index_R[rows], head_VD, log_weight_V)
            loss_R[rows], probability_R[rows], is_top_R[rows], gradient = _chunk(
                logits, label_R[rows, None], soft_weight, p
            )
            gradient_RD[rows] = gradient.to(head_VD.dtype) @ head_VD
        ctx.save_for_backward(gradient_RD)
        ctx.mark_non_differentiable(probability_R, is_top_R)
        return loss_R, probability_R, is_top_R

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        (gradient_RD,) = ctx.saved_tensors
        scaled_RD = gradient_RD * upstream[0][:, None].to(gradient_RD.dtype)
        return scaled_RD, None, None, None, None, None, None


def _logits(rows: Tensor, head_VD: Tensor, log_weight_V: Tensor | None) -> Tensor:
    """Returns the logits f32[C, V] of rows [C, D], with the log-weights of a shortlist added."""
    logits = (rows @ head_VD.T).float()
    return logits if log_weight_V is None else logits.add_(log_weight_V)


def _target_distribution(
    target_ND: Tensor, index_C: Tensor, head_VD: Tensor, log_weight_V: Tensor | None
) -> Tensor:
    """Returns p of the positions index_C, f32[C, V]; neighbours that are equal share the work."""
    position, inverse = torch.unique_consecutive(index_C, return_inverse=True)
    p = torch.softmax(_logits(target_ND[position], head_VD, log_weight_V), -1)
    return p if len(p) == len(index_C) else p.index_select(0, inverse)


def _chunk(
    logits: Tensor, label: Tensor, soft: float, p: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the losses, q of the labels, whether these are on top, and the gradients at the
    logits, from logits f32[C, V], labels i64[C, 1] and p f32[C, V]."""
    q = torch.softmax(logits, -1)
    top = logits.amax(-1, keepdim=True)
    log_z = top - q.amax(-1, keepdim=True).log()  # three times as fast as logsumexp
    of_label = logits.gather(1, label)
    label_q, is_top = (of_label - log_z).exp(), of_label == top
    loss = (1 - soft) * (log_z - of_label)
    gradient = q
    if soft:
        assert p is not None
        loss += soft * (log_z - logits.mul_(p).sum(-1, keepdim=True))
        gradient.sub_(p, alpha=soft)
    gradient.scatter_add_(1, label, torch.full_like(log_z, soft - 1))
    return loss[:, 0], label_q[:, 0], is_top[:, 0], gradient


def head_losses(
    hidden_RD: Tensor,
    head_VD: Tensor,
    label_R: Tensor,
    soft_weight: float = 0.0,
    target_ND: Tensor | None = None,
    target_index_R: Tensor | None = None,
    shortlist: Shortlist | None = None,
) -> HeadLosses:
    """Returns the losses of rows through a frozen head, q = softmax(hidden · headᵀ).

    No gradient reaches head or target. hidden_RD and target_ND have one dtype, to which the head is
    converted; label_R is i64 without IGNORED. target_ND are the target's features at N positions,
    and the p of row r is softmax(target · headᵀ) of position target_index_R[r], i64. Rows of one
    position should be neighbours, because p is made once for them. With a `shortlist`, which has
    all labels, q and p are estimated over its tokens, and "on top" means above all others of it.
    Raises UserError on a soft_weight without the target.
    """
    if not soft_weight:
        target_ND = target_index_R = None
    elif target_ND is None or target_index_R is None:
        raise UserError(
            f"got soft_weight {soft_weight} without the target's features, expected features"
        )
    log_weight_S = None
    if shortlist is not None:
        head_VD, log_weight_S = head_VD[shortlist.index_S], shortlist.log_weight_S
        label_R = shortlist.position_V[label_R]
    head_VD = head_VD.to(hidden_RD.dtype)
    return HeadLosses(
        *_HeadLosses.apply(
            hidden_RD, head_VD, label_R, soft_weight, target_ND, target_index_R, log_weight_S
        )
    )


def head_cross_entropy(
    hidden_RD: Tensor,
    head_VD: Tensor,
    label_R: Tensor,
    weight_R: Tensor,
    teacher_RD: Tensor | None = None,
    soft_weight: float = 0.0,
    shortlist: Shortlist | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns the cross-entropy through a frozen head, and which labels are the drafter's guess.

        loss = Σ_r weight_r · [ −(1−s) log q_r(label_r) − s Σ_v p_r(v) log q_r(v) ],

    q = softmax(hidden · headᵀ), p = softmax(teacher · headᵀ), s = soft_weight. No gradient reaches
    head, weights or teacher.

    hidden_RD and teacher_RD have one dtype; label_R is i64 without IGNORED, weight_R f32. The
    results are the loss, an f32 scalar, and bool[R]: whether no token has a higher logit than the
    label. `shortlist` is `head_losses`'. Raises UserError on a soft_weight without teacher_RD.
    """
    index_R = torch.arange(len(hidden_RD), device=hidden_RD.device)
    losses = head_losses(hidden_RD, head_VD, label_R, soft_weight, teacher_RD, index_R, shortlist)
    return (losses.loss_R * weight_R.detach()).sum(), losses.is_top_R


def trained_head_cross_entropy(
    hidden_RD: Tensor,
    head_VD: Tensor,
    label_R: Tensor,
    weight_R: Tensor,
    teacher_RD: Tensor,
    teacher_VD: Tensor,
    soft_weight: float = 0.0,
    bias_V: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns what `head_cross_entropy` does, for a head that learns too, with its bias.

    p = softmax(teacher · teacher_VDᵀ), where teacher_VD is the target's own head. Logits are
    computed again for the backward pass, chunk by chunk, so that they are never all in memory.
    """

    def chunk(rows: slice) -> tuple[Tensor, Tensor]:
        logits = F.linear(hidden_RD[rows], head_VD).float()
        if bias_V is not None:
            logits = logits + bias_V
        losses_R = (1 - soft_weight) * F.cross_entropy(logits, label_R[rows], reduction="none")
        if soft_weight:
            p = torch.softmax(F.linear(teacher_RD[rows].detach(), teacher_VD).float(), -1)
            losses_R = losses_R + soft_weight * F.cross_entropy(logits, p, reduction="none")
        of_label_R = logits.detach().gather(1, label_R[rows, None])[:, 0]
        return (losses_R * weight_R[rows]).sum(), of_label_R == logits.detach().amax(-1)

    loss = hidden_RD.new_zeros((), dtype=torch.float32)
    is_top_R = torch.empty_like(label_R, dtype=torch.bool)
    # Chunks are larger than CHUNK_ROWS, because each one adds a [V, D] gradient. There is always
    # one, so that the head has a gradient even if there are no rows.
    for start in range(0, max(len(hidden_RD), 1), 4 * CHUNK_ROWS):
        rows = slice(start, start + 4 * CHUNK_ROWS)
        part, is_top_R[rows] = checkpoint(chunk, rows, use_reentrant=False)
        loss = loss + part
    return loss, is_top_R


def feature_regression(predicted_RD: Tensor, feature_RD: Tensor, weight_R: Tensor) -> Tensor:
    """Returns EAGLE's regression loss of predicted features, an f32 scalar.

    loss = Σ_r weight_r · mean over D of SmoothL1(f̂_r, f_r). No gradient reaches feature_RD: in
    joint training the target would otherwise move its features towards the drafter's.
    """
    feature_RD = feature_RD.detach().float()
    losses_R = F.smooth_l1_loss(predicted_RD.float(), feature_RD, reduction="none").mean(-1)
    return (losses_R * weight_R).sum()
