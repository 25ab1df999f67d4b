"""The limits that audits judge divergences by, on rows whose deviations are known."""

import numpy as np
import pytest

from spec_runtime.loop.stats import Stats
from spec_runtime.measure import audit, limits
from spec_runtime.measure.audit import Answer, AuditReport, Divergence, RowDelta

VOCAB = 4096


def noisy_rows(number: int, sigma: float, seed: int = 0) -> list[limits.ChainRow]:
    """Rows in two forms that differ by Gaussian noise in each logit."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(number):
        alone_V = rng.normal(0, 3, VOCAB)
        rows.append(limits.chain_row(alone_V, alone_V + rng.normal(0, sigma, VOCAB)))
    return rows


def report_with(gap: float | None, rows: list[limits.ChainRow], delta: float = 0.0) -> AuditReport:
    divergence = Divergence("p", 3, 1, 2, gap, 10.0)
    answer = Answer("p", [0] * 8, [0] * 8, Stats(), divergence)
    tree_rows = [RowDelta("p", 3, each, 10.0) for each in (delta, *[0.0] * 299)]
    return AuditReport("int8", [answer], rows=tree_rows, chain_rows=rows)


def test_a_row_by_hand() -> None:
    row = limits.chain_row(np.array([1.0, 5.0, 3.0]), np.array([1.0, 4.5, 3.5]))
    assert row.delta == 0.5
    assert row.gap_C.tolist() == [2.0, 4.0]
    assert row.move_C.tolist() == [1.0, 0.5]


def test_a_wrong_token_below_the_largest_deviation_is_real() -> None:
    """One of 4,096 logits moves by about 1.3; two likely ones hardly move by 1 together."""
    rows = noisy_rows(400, 0.3)
    largest = max(row.delta for row in rows)
    found = audit.summarise(report_with(0.0, rows))
    limit = found["rounding_limit"]
    assert 0.6 < limit < 0.85 * largest
    between = (limit + largest) / 2
    assert audit.classify(between, 1e-3, largest) == "rounding"  # the limit that was
    for gap, kind in ((between, "real"), (-between, "real"), (0.9 * limit, "rounding")):
        wrong = audit.summarise(report_with(gap, rows))
        assert wrong["divergences"][0]["class"] == kind
        assert wrong["real"] == (kind == "real")


def test_a_row_below_twice_the_largest_deviation_is_real() -> None:
    rows = noisy_rows(400, 0.3)
    largest = max(row.delta for row in rows)
    limit = audit.summarise(report_with(0.0, rows))["row_limit"]
    assert largest < limit < 1.6 * largest
    for delta, number in ((1.7 * largest, 1), (largest, 0)):
        found = audit.summarise(report_with(0.0, rows, delta))
        assert (len(found["deviating_rows"]), found["real"]) == (number, number)


@pytest.mark.parametrize("heavy", [False, True])
def test_sound_rows_are_hardly_ever_called_real(heavy: bool) -> None:
    """Counts the false alarms of 200 audits of 1,000 tokens each, with Gaussian noise and with
    noise whose scale differs from row to row: two are what 0.01 an audit allows."""
    rng = np.random.default_rng(1)

    def pair_noise(shape: tuple[int, ...]) -> np.ndarray:
        scale = rng.uniform(0.3, 1.0, shape[:-1])[..., None] if heavy else 0.7
        return scale * rng.normal(0, 0.4, shape)

    gap_RC = np.cumsum(rng.exponential(0.8, (900, 7)), axis=1)
    move_RC = pair_noise(gap_RC.shape)
    rows = [limits.ChainRow(9.0, *each) for each in zip(gap_RC, move_RC, strict=True)]
    found = limits.derive(rows, num_tokens=1000, num_rows=0)
    assert 0.003 < found.false_gaps <= limits.FALSE_ALARMS
    assert found.gap < 3
    false = 0
    for _ in range(200):
        gap_TC = np.cumsum(rng.exponential(0.8, (1000, 7)), axis=1)
        false += int(((pair_noise(gap_TC.shape) > gap_TC) & (gap_TC > found.gap)).sum())
    assert false <= 2


def test_small_noise_explains_partings_at_gaps_that_no_measured_row_had() -> None:
    """As at fp16: of 64 rows' gaps hardly one is as small as a move. Before, the limit was 0."""
    rng = np.random.default_rng(2)
    partings = false = 0
    for _ in range(200):
        gap_RC = np.cumsum(rng.exponential(0.8, (64, 7)), axis=1)
        move_RC = rng.normal(0, 0.02, gap_RC.shape)
        rows = [limits.ChainRow(9.0, *each) for each in zip(gap_RC, move_RC, strict=True)]
        limit = limits.derive(rows, num_tokens=240, num_rows=0).gap
        assert 0.02 < limit < 0.15
        gap_T = rng.exponential(0.8, 240)
        is_parting = rng.normal(0, 0.02, 240) > gap_T
        partings += int(is_parting.sum())
        false += int((is_parting & (gap_T > limit)).sum())
    assert partings > 100, "no test"
    assert false <= 4
    tied = [limits.ChainRow(9.0, np.zeros(7), move_C) for move_C in move_RC]
    assert 0 < limits.derive(tied, 240, 0).gap < 0.3


def test_rows_without_noise_allow_nothing() -> None:
    rows = noisy_rows(40, 0.0)
    assert limits.derive(rows, 100, 100) == limits.Limits(0.0, 0.0, 0.0, 0.0)
    assert limits.derive([], 100, 100) == limits.EXACT
    found = audit.summarise(report_with(0.5, rows, 0.5))
    assert found["real"] == 2


def test_limits_are_never_wider_than_the_global_ones() -> None:
    for seed in range(20):
        rows = noisy_rows(3, 0.5, seed)  # far too few to tell a tail from
        largest = max(row.delta for row in rows)
        found = limits.derive(rows, 100_000, 100_000)
        assert found.gap <= largest
        assert found.row <= 2 * largest


def test_the_tail_by_hand() -> None:
    """Forty values 1 … 40: the largest twenty begin at 21 and are on average 9.5 above it."""
    tail = limits.Tail.fit(np.arange(1.0, 41.0))
    assert (tail.start, tail.share, tail.scale) == (21.0, 0.5, 9.5)
    assert float(tail.beyond(21 + 9.5)) == pytest.approx(0.5 / np.e)
    assert tail.limit(0.5 / np.e) == pytest.approx(30.5)
    assert tail.limit(0.9) == 21.0
