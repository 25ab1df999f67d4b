"""Packs matrices into 4 bits, in the form that holds them best.

*Minimum*: w ≈ d·q + m in blocks of 32, as the GGUF types Q4_1 and Q4_K have them. In a graph that
is MatMulNBits on d·q, plus the block sums of x times m.
*Zero points*: w ≈ d·(q − z) with a whole z from 0 to 15 a block, as GPTQ, AWQ and Q4_0 have them.
That is one MatMulNBits, quicker with blocks of 64 or 128.
"""

from dataclasses import dataclass

import numpy as np

from spec_export.graphs.packed import Arrays
from spec_export.graphs.rounding import ON_GRID, num_steps

BLOCK = 32  # of weights without a form of their own, and of minima
BLOCKS = (128, 64, 32)
MOST = 15  # the largest of 4 bits
SHRUNK = (1.0, 0.96, 0.92, 0.88, 0.84, 0.8)  # of a block's range, among which the best is taken
LOOKED_AT = 64  # rows of a matrix, which tell its form
NEARLY_ALL = 0.98  # of the blocks of a matrix that is in a form
FAR_BETTER = 0.8  # of the error with zero points, from which minima are worth their nodes


@dataclass(frozen=True)
class Form:
    """Says how a matrix is packed: with minima, or with zero points in blocks of `size`."""

    has_minima: bool
    size: int = BLOCK


def form_of(rows_NK: np.ndarray, size: int = BLOCK) -> Form:
    """Returns the form of these rows, f32[N, K]: zero points with the largest blocks that hold all
    of them exactly, or nearly all and minima no better; else minima, where these hold them far
    better; else zero points in blocks of at most `size`."""
    rows_NK = rows_NK[:LOOKED_AT]
    sizes = [each for each in BLOCKS if rows_NK.shape[1] % each == 0]
    share_of = {each: _on_zero_points(in_blocks(rows_NK, each))[2].mean() for each in sizes}
    held = next((each for each in sizes if share_of[each] >= NEARLY_ALL), None)
    if held is None or share_of[held] < 1:
        with_minima = unpack_minima(pack_minima(rows_NK)) - rows_NK
        without = unpack_zero_points(pack_zero_points(rows_NK, held or BLOCK)) - rows_NK
        if np.linalg.norm(with_minima) < FAR_BETTER * np.linalg.norm(without):
            return Form(True)
    return Form(False, held or next(each for each in sizes if each <= size))


def pack_minima(rows_NK: np.ndarray) -> Arrays:
    """Packs rows so that w ≈ scale·q + minimum, in blocks of 32.

    Returns q packed u8[N, B, 16] (value 2j in the low half of a byte, 2j+1 in the high half), scale
    f32[N, B] and minimum f32[N, B].
    """
    blocks = in_blocks(rows_NK, BLOCK)
    low, high = blocks.min(-1), blocks.max(-1)
    scale = (high - low) / num_steps(blocks, low, high, MOST)
    places = (blocks - low[..., None]) / np.where(scale == 0, 1, scale)[..., None]
    q = np.rint(places).clip(0, MOST).astype(np.uint8)
    return _in_pairs(q), scale.astype(np.float32), low.astype(np.float32)


def unpack_minima(packed: Arrays) -> np.ndarray:
    """Returns the rows f32[N, K] that `pack_minima` made these of."""
    pairs, scale, low = packed
    q = _out_of_pairs(pairs)
    return (q * scale[..., None] + low[..., None]).reshape(len(q), -1)


def pack_zero_points(rows_NK: np.ndarray, size: int) -> Arrays:
    """Packs rows so that w ≈ scale·(q - zero), in blocks of `size`.

    Blocks on a grid are held exactly; of the others the range is the one of SHRUNK with the least
    squared error. Returns q packed u8[N, B, size / 2], scale f32[N, B] and the zero points, packed
    alike, u8[N, (B + 1) / 2].
    """
    blocks = in_blocks(rows_NK, size)
    scale, zero, is_exact = _on_zero_points(blocks)
    others = ~is_exact
    scale[others], zero[others] = _nearest_zero_points(blocks[others])
    step = np.where(scale == 0, 1, scale)[..., None]
    q = (np.rint(blocks / step) + zero[..., None]).clip(0, MOST).astype(np.uint8)
    zeros = np.pad(zero.astype(np.uint8), ((0, 0), (0, zero.shape[1] % 2)))
    return _in_pairs(q), scale.astype(np.float32), _in_pairs(zeros)


def unpack_zero_points(packed: Arrays) -> np.ndarray:
    """Returns the rows f32[N, K] that `pack_zero_points` made these of."""
    pairs, scale, zeros = packed
    q, zero = _out_of_pairs(pairs), _out_of_pairs(zeros)[:, : scale.shape[1]]
    return ((q.astype(np.float32) - zero[..., None]) * scale[..., None]).reshape(len(q), -1)


def _on_zero_points(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns scale and zero point of each block that is whole multiples of its scale, f32[N, B]
    each, and which blocks are, bool[N, B].

    The least step between values may be a few times the scale.
    """
    low, high = blocks.min(-1), blocks.max(-1)
    step = (high - low) / num_steps(blocks, low, high, MOST)
    step = np.where(step == 0, np.abs(low), step)
    step = np.where(step == 0, 1, step)
    scale, zero = np.zeros_like(step), np.zeros_like(step)
    is_exact = np.zeros(step.shape, np.bool_)
    for parts in (1, 2, 3, 4):
        each = step / parts
        least, most = np.rint(low / each), np.rint(high / each)
        fits = ~is_exact & (most - np.minimum(least, 0) <= MOST) & (least >= -MOST)
        places = blocks[fits] / each[fits][..., None]
        fits[fits] = (np.abs(places - np.rint(places)) < ON_GRID).all(-1)
        scale[fits], zero[fits] = each[fits], np.maximum(0, -least)[fits]
        is_exact |= fits
    return scale, zero, is_exact


def _nearest_zero_points(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns scale and zero point of blocks f32[M, G] that are on no grid, f32[M] each."""
    low, high = blocks.min(-1).clip(max=0), blocks.max(-1).clip(min=0)
    span = high - low
    zero = np.rint(-low * MOST / np.where(span == 0, 1, span))
    best, scale = np.full(len(blocks), np.inf), np.zeros_like(span)
    for share in SHRUNK:
        each = share * span / MOST
        step = np.where(each == 0, 1, each)[:, None]
        q = (np.rint(blocks / step) + zero[:, None]).clip(0, MOST)
        error = np.square((q - zero[:, None]) * step - blocks).sum(-1)
        better = error < best
        scale[better], best[better] = each[better], error[better]
    return scale, zero


def in_blocks(rows_NK: np.ndarray, size: int) -> np.ndarray:
    """Returns rows in blocks, f32[N, B, size]."""
    return rows_NK.reshape(len(rows_NK), -1, size)


def _in_pairs(values: np.ndarray) -> np.ndarray:
    """Packs two values of 4 bits to a byte, along the last axis; the first is the low half."""
    return values[..., ::2] | (values[..., 1::2] << 4)


def _out_of_pairs(packed: np.ndarray) -> np.ndarray:
    return np.stack((packed & 15, packed >> 4), -1).reshape(*packed.shape[:-1], -1)
