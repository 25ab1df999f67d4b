"""Chooses the precision of training: bfloat16 where the machine is fast at it."""

import time
from typing import Literal

import torch


def fast_precision() -> Literal["bf16", "fp32"]:
    """Returns "fp32" where the machine has no instructions for bfloat16, which then takes a CPU 50
    times as long; a product of 256 rows shows it in about 0.1 s."""
    if torch.cuda.is_available():
        return "bf16" if torch.cuda.is_bf16_supported() else "fp32"
    return "fp32" if seconds(torch.bfloat16) > 4 * seconds(torch.float32) else "bf16"


def seconds(dtype: torch.dtype) -> float:
    """Returns the seconds that the CPU takes for a product [256, 256] x [256, 256]."""
    square = torch.ones(256, 256, dtype=dtype)
    taken = []
    for _ in range(4):
        begin = time.perf_counter()
        torch.mm(square, square)
        taken.append(time.perf_counter() - begin)
    return min(taken)
