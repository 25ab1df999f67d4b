"""Defines products, norms and the table of the vocabulary, with weights that take no gradient.

Letters: N rows of one step, M rows of logits asked for, V vocabulary, D hidden width.
"""

import torch.nn.functional as F
from torch import Tensor, nn


def frozen(tensor: Tensor) -> nn.Parameter:
    """Returns a parameter that shares the tensor's memory and takes no gradient."""
    return nn.Parameter(tensor.detach(), requires_grad=False)


class Projection(nn.Module):
    """Computes x @ W (+ bias), x_ND -> [N, out]; W is held [in, out], so that one MatMul suffices.

    W may be a transposed view of a transformers weight [out, in]: no bytes are copied.
    """

    bias: nn.Parameter | None

    def __init__(self, weight_out_in: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.weight = frozen(weight_out_in.t())
        self.bias = None if bias is None else frozen(bias)

    def forward(self, x_ND: Tensor) -> Tensor:
        y = x_ND @ self.weight
        return y if self.bias is None else y + self.bias


class RMSNorm(nn.Module):
    """Applies the root-mean-square norm over the last axis, with a learned scale."""

    def __init__(self, weight_D: Tensor, eps: float) -> None:
        super().__init__()
        self.weight = frozen(weight_D)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class LayerNorm(nn.Module):
    """Applies the norm of mean and variance over the last axis, with a learned scale and bias."""

    bias: nn.Parameter | None

    def __init__(self, weight_D: Tensor, bias_D: Tensor | None, eps: float) -> None:
        super().__init__()
        self.weight = frozen(weight_D)
        self.bias = None if bias_D is None else frozen(bias_D)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (x.shape[-1],), self.weight, self.bias, self.eps)


Norm = RMSNorm | LayerNorm


class VocabularyTable(nn.Module):
    """Holds one row per token id, read as embedding or as LM head; tied models use one for both."""

    input_scale: nn.Parameter | None

    def __init__(
        self,
        weight_VD: Tensor,
        input_scale_D: Tensor | None = None,
        *,
        embedding_scale: float = 1.0,
    ) -> None:
        """`input_scale_D`, if given, scales what `score` reads, for a head that was smoothed.
        `embedding_scale` is a factor on what `embed` returns."""
        super().__init__()
        self.weight = frozen(weight_VD)
        self.input_scale = None if input_scale_D is None else frozen(input_scale_D)
        self.embedding_scale = embedding_scale
        self.is_bounded = False

    def embed(self, ids_N: Tensor) -> Tensor:
        """Returns the rows of these ids, [N,D]; of a bounded table the last row stands for all ids
        after it, which only the padding of a target's table has."""
        if self.is_bounded:
            ids_N = ids_N.clamp(max=len(self.weight) - 1)
        rows_ND = F.embedding(ids_N, self.weight)
        return rows_ND if self.embedding_scale == 1 else rows_ND * self.embedding_scale

    def score(self, x_MD: Tensor) -> Tensor:
        """Returns logits [M,V]; exported as Gemm with transB=1, which stores a tied table once."""
        return F.linear(x_MD if self.input_scale is None else x_MD * self.input_scale, self.weight)
