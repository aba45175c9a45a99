"""Growth is told from noise."""

import numpy as np
import pytest

from benchmarks.slope import slope

STEPS = np.arange(4000.0)


@pytest.mark.parametrize("rate", [-3.0, 0.0, 0.5, 20.0])
def test_a_straight_line_has_its_slope_and_no_doubt(rate: float) -> None:
    found = slope(STEPS.tolist(), list(100 + rate * STEPS / 1000), bound=1.0)
    assert (found.per_1000, found.low, found.high) == pytest.approx((rate,) * 3, abs=1e-9)
    assert found.flat == (rate <= 1.0)


def test_what_happens_in_the_first_half_does_not_count() -> None:
    assert slope(STEPS.tolist(), list(np.minimum(STEPS, 1999)), bound=0.0).per_1000 == pytest.approx(0.0)


def test_the_interval_covers_the_truth_of_correlated_noise_as_often_as_it_says() -> None:
    """The noise of a drifting allocator: each sample is nearly the one before."""
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(300):
        noise = np.zeros(len(STEPS))
        for index, kick in enumerate(rng.normal(size=len(STEPS) - 1), start=1):
            noise[index] = 0.95 * noise[index - 1] + kick
        found = slope(STEPS.tolist(), list(noise + 2.0 * STEPS / 1000), bound=0.0)
        covered += found.low <= 2.0 <= found.high
    assert 0.92 <= covered / 300 <= 0.98


def test_a_leak_below_the_bound_is_flat_and_one_above_it_is_not() -> None:
    rng = np.random.default_rng(1)
    for rate, flat in ((0.4, True), (1.5, False)):
        values = list(300 + rate * STEPS / 1000 + 0.1 * rng.normal(size=len(STEPS)))
        assert slope(STEPS.tolist(), values, bound=1.0).flat is flat
