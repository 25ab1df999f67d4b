"""Packs taps into one byte a number, for feature caches that would not fit the disk.

Each row of a tap is scaled by a power of two, so that its greatest number is at most 448, and
rounded to float8 with 4 bits of exponent and 3 of mantissa (e4m3). A number is at most 1/17 (5.9 %)
off, unless it is below 2⁻¹³ of its row's greatest: those are off by at most 2⁻¹⁷ of the greatest.
Scaling back is exact in bfloat16.
"""

from __future__ import annotations

import torch
from torch import Tensor

_GREATEST = 448.0  # the greatest number of float8_e4m3fn
_EXPONENT = 60  # rows' greatest numbers are taken to lie between 2⁻⁵² and 2⁶⁸
_SIGN_AND_CODE = 0x87F0 - 0x10000  # the bits of a bfloat16 that a code fills, as int16


def pack(tap_TND: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the codes u8[T, N, D] and the rows' exponents i8[T, N] of floating taps [T, N, D].

    The taps are about codes · 2^exponent, see the module.
    """
    tap = tap_TND.float()
    exponent_TN = torch.log2(tap.abs().amax(-1) / _GREATEST).ceil()  # −∞ for a row of zeros
    exponent_TN = exponent_TN.clamp(-_EXPONENT, _EXPONENT)
    scaled = torch.ldexp(tap, -exponent_TN.int()[..., None])
    codes = scaled.clamp(-_GREATEST, _GREATEST).to(torch.float8_e4m3fn)
    return codes.view(torch.uint8), exponent_TN.to(torch.int8)


def unpack(code_TND: Tensor, exponent_TN: Tensor) -> Tensor:
    """Returns the taps bf16[T, N, D] that `pack` has stored.

    A code's sign, 4 bits of exponent and 3 of mantissa are moved to their places in a bfloat16,
    whose exponent counts from −127 instead of −7: that is the number times 2⁻¹²⁰. It takes a third
    of the time of torch's own conversion, which would show in a training step.
    """
    shifted = (code_TND.to(torch.int16) << 8) >> 4  # copies the sign into the bits between, too
    tap_TND = (shifted & _SIGN_AND_CODE).view(torch.bfloat16)
    scale_TN = torch.exp2(exponent_TN.float() + 60).bfloat16()
    return tap_TND.mul_(2.0**60).mul_(scale_TN[..., None])
