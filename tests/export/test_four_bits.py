"""Tests matrices in 4 bits: the form that each is given, exactness on a grid, errors off it."""

import numpy as np
import pytest

from spec_export.graphs.four_bits import (
    Form,
    form_of,
    pack_minima,
    pack_zero_points,
    unpack_minima,
    unpack_zero_points,
)

N, K = 24, 256
rng = np.random.default_rng(0)
RANDOM = rng.normal(size=(N, K)).astype(np.float32)


def on_zero_points(size: int, low: int = 0, high: int = 15, zero: int | None = None) -> np.ndarray:
    """Returns rows d (q - z), q from `low` to `high`, as GPTQ and AWQ have them."""
    blocks = N, K // size
    q = rng.integers(low, high + 1, (*blocks, size))
    z = rng.integers(0, 16, (*blocks, 1)) if zero is None else zero
    d = rng.uniform(0.01, 0.2, (*blocks, 1))
    return (d * (q - z)).reshape(N, K).astype(np.float32)


def on_minima() -> np.ndarray:
    """Returns rows d q + m, as Q4_1 has them."""
    shape = N, K // 32
    q = rng.integers(0, 16, (*shape, 32))
    d, m = rng.uniform(0.01, 0.2, (*shape, 1)), rng.normal(size=(*shape, 1))
    return (d * q + m).reshape(N, K).astype(np.float32)


@pytest.mark.parametrize("size", [32, 64, 128])
def test_a_checkpoint_in_4_bits_keeps_its_form_and_values(size: int) -> None:
    for rows in (on_zero_points(size), on_zero_points(size, zero=8)):
        assert form_of(rows) == Form(False, size)
        found = unpack_zero_points(pack_zero_points(rows, size))
        np.testing.assert_allclose(found, rows, atol=1e-5)
    assert form_of(RANDOM, size) == Form(False, size)


def test_minima_are_kept_where_zero_points_are_not_whole() -> None:
    rows = on_minima()
    assert form_of(rows) == Form(True)
    np.testing.assert_allclose(unpack_minima(pack_minima(rows)), rows, atol=1e-5)
    found = unpack_zero_points(pack_zero_points(rows, 32))
    assert np.abs(found - rows).max() > 1e-3, "the other form would have done"
    mixed = np.concatenate([rows[:, :192], RANDOM[:, :64]], axis=1)  # as Q5_K has it
    assert form_of(mixed) == Form(True)
    nearly = on_zero_points(32)
    nearly[:1, :32] = rows[:1, :32]  # a block of 3 bits from MLX may be no whole zero off
    assert form_of(nearly) == Form(True)
    found = unpack_zero_points(pack_zero_points(nearly, 32))
    assert np.abs(found - nearly).max() > 1e-3, "zero points would lose it"


@pytest.mark.parametrize(
    "rows",
    [
        np.zeros((2, 64), np.float32),
        np.full((2, 64), -0.3, np.float32),
        on_zero_points(32, 0, 15, zero=0),  # nothing below zero
        on_zero_points(32, 0, 15, zero=15),
        np.tile(np.array([2, 4, 8, -6], np.float32) * 0.1, (2, 16)),  # on every second step
        np.tile(np.array([3, -3, 6, 0], np.float32) * 0.1, (2, 16)),
        np.tile(np.array([1, 5, 9, 13], np.float32) * 0.1, (2, 16)),  # steps of 4 beside zero
    ],
)
def test_blocks_with_few_values_are_exact(rows: np.ndarray) -> None:
    found = unpack_zero_points(pack_zero_points(rows, 32))
    np.testing.assert_allclose(found, rows, atol=1e-6)


def test_other_weights_are_nearer_than_a_step_and_shrinking_ranges_helps() -> None:
    for size in (32, 64, 128):
        packed = pack_zero_points(RANDOM, size)
        found = unpack_zero_points(packed)
        blocks = RANDOM.reshape(N, -1, size)
        step = (blocks.max(-1) - blocks.min(-1)) / 15
        error = np.abs(found - RANDOM).reshape(blocks.shape)
        assert (error.max(-1) <= 2 * step).all()  # at the ends, where the range was shrunk
        plain = np.square(step).mean() / 12  # of rounding over the whole range
        assert np.square(error).mean() < plain * (1.05 if size == 32 else 1.0)


def test_two_values_to_a_byte_and_odd_numbers_of_blocks() -> None:
    rows = RANDOM[:, :96]
    q, scale, zeros = pack_zero_points(rows, 32)
    assert (q.shape, scale.shape, zeros.shape) == ((N, 3, 16), (N, 3), (N, 2))
    assert (zeros[:, 1] >> 4 == 0).all()
    assert form_of(rows, 128) == Form(False, 32), "the largest that divides the width"
