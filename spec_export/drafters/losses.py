"""Computes the losses of guesses: on hard labels, on the target's distribution, and on features.

p is the target's distribution, q the drafter's; R counts rows with a label.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

IGNORED = -100  # label of a row that carries no loss
CHUNK_ROWS = 256  # logits of a chunk stay in cache: 256 rows of an 8 k vocabulary are 8 MB


def position_weights(count: int, decay: float) -> Tensor:
    """Returns λ_k = decay^k for k = 0 … count-1, f32[count] (Medusa and ParallelSpec use 0.8)."""
    return decay ** torch.arange(count, dtype=torch.float32)


class _HeadCrossEntropy(torch.autograd.Function):
    """Computes `head_cross_entropy` and its gradient chunk by chunk in the forward pass.

    The logits are in the processor's cache then: to keep [R, V] logits for a backward pass would
    cost more than both matrix products. With s = soft_weight, the gradient at row r's logits is
    weight_r · (q_r − s · p_r − (1 − s) · onehot(label_r)).
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_RD: Tensor,
        head_VD: Tensor,
        label_R: Tensor,
        weight_R: Tensor,
        teacher_RD: Tensor | None,
        soft_weight: float,
    ) -> tuple[Tensor, Tensor]:
        gradient_RD = torch.empty_like(hidden_RD)
        guess_R = torch.empty_like(label_R)
        loss = hidden_RD.new_zeros((), dtype=torch.float32)
        for start in range(0, len(hidden_RD), CHUNK_ROWS):
            rows = slice(start, start + CHUNK_ROWS)
            label, weight = label_R[rows, None], weight_R[rows, None].float()
            logits = (hidden_RD[rows] @ head_VD.T).float()
            guess_R[rows] = logits.argmax(-1)
            log_z = logits.logsumexp(-1, keepdim=True)
            loss += (1 - soft_weight) * ((log_z - logits.gather(1, label)) * weight).sum()
            gradient = torch.exp(logits - log_z)
            if teacher_RD is not None:
                p = torch.softmax((teacher_RD[rows] @ head_VD.T).float(), -1)
                loss += (
                    soft_weight
                    * ((log_z[:, 0] - torch.linalg.vecdot(p, logits)) * weight[:, 0]).sum()
                )
                gradient.sub_(p, alpha=soft_weight)
            gradient.scatter_add_(1, label, torch.full_like(log_z, soft_weight - 1))
            gradient_RD[rows] = gradient.mul_(weight).to(head_VD.dtype) @ head_VD
        ctx.save_for_backward(gradient_RD)
        ctx.mark_non_differentiable(guess_R)
        return loss, guess_R

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        (gradient_RD,) = ctx.saved_tensors
        return gradient_RD * upstream[0].to(gradient_RD.dtype), None, None, None, None, None


def head_cross_entropy(
    hidden_RD: Tensor,
    head_VD: Tensor,
    label_R: Tensor,
    weight_R: Tensor,
    teacher_RD: Tensor | None = None,
    soft_weight: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Returns the cross-entropy through a frozen head, and its guesses.

        loss = Σ_r weight_r · [ −(1−s) log q_r(label_r) − s Σ_v p_r(v) log q_r(v) ],

    q = softmax(hidden · headᵀ), p = softmax(teacher · headᵀ), s = soft_weight. No gradient reaches
    head, weights or teacher.

    hidden_RD, head_VD and teacher_RD have one dtype; label_R is i64 without IGNORED, weight_R f32.
    The results are the loss, an f32 scalar, and the argmax of q, i64[R]. Raises ValueError on a
    soft_weight without teacher_RD.
    """
    if soft_weight and teacher_RD is None:
        raise ValueError("got a soft_weight without the target's features: soft labels need them")
    teacher = teacher_RD.detach() if soft_weight and teacher_RD is not None else None
    loss, guess_R = _HeadCrossEntropy.apply(
        hidden_RD, head_VD, label_R, weight_R, teacher, soft_weight
    )
    return loss, guess_R


def trained_head_cross_entropy(
    hidden_RD: Tensor,
    head_VD: Tensor,
    label_R: Tensor,
    weight_R: Tensor,
    teacher_RD: Tensor,
    teacher_VD: Tensor,
    soft_weight: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Returns what `head_cross_entropy` does, for a head that learns too.

    p = softmax(teacher · teacher_VDᵀ), where teacher_VD is the target's own head. Logits are
    computed again for the backward pass, chunk by chunk, so that they are never all in memory.
    """

    def chunk(rows: slice) -> tuple[Tensor, Tensor]:
        logits = F.linear(hidden_RD[rows], head_VD).float()
        losses_R = (1 - soft_weight) * F.cross_entropy(logits, label_R[rows], reduction="none")
        if soft_weight:
            p = torch.softmax(F.linear(teacher_RD[rows].detach(), teacher_VD).float(), -1)
            losses_R = losses_R + soft_weight * F.cross_entropy(logits, p, reduction="none")
        return (losses_R * weight_R[rows]).sum(), logits.argmax(-1)

    loss, guess_R = hidden_RD.new_zeros((), dtype=torch.float32), torch.empty_like(label_R)
    # Chunks are larger than CHUNK_ROWS, because each one adds a [V, D] gradient. There is always
    # one, so that the head has a gradient even if there are no rows.
    for start in range(0, max(len(hidden_RD), 1), 4 * CHUNK_ROWS):
        rows = slice(start, start + 4 * CHUNK_ROWS)
        part, guess_R[rows] = checkpoint(chunk, rows, use_reentrant=False)
        loss = loss + part
    return loss, guess_R


def feature_regression(predicted_RD: Tensor, feature_RD: Tensor, weight_R: Tensor) -> Tensor:
    """Returns EAGLE's regression loss of predicted features, an f32 scalar.

    loss = Σ_r weight_r · mean over D of SmoothL1(f̂_r, f_r). No gradient reaches feature_RD: in
    joint training the target would otherwise move its features towards the drafter's.
    """
    feature_RD = feature_RD.detach().float()
    losses_R = F.smooth_l1_loss(predicted_RD.float(), feature_RD, reduction="none").mean(-1)
    return (losses_R * weight_R).sum()
