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


def seconds(dtype: torch.dtype, n: int = 256, device: str = "cpu") -> float:
    """Returns the seconds that a device takes for a product [n, n] x [n, n]."""
    square = torch.ones(n, n, dtype=dtype, device=device)
    taken = []
    for _ in range(4):
        begin = time.perf_counter()
        torch.mm(square, square)[0, 0].item()  # waits for a GPU
        taken.append(time.perf_counter() - begin)
    return min(taken)
