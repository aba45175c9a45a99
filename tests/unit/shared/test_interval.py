"""Wilson's interval against its definition: the p at which |share - p| is exactly z standard errors of p."""

import numpy as np
import pytest

from shared.statistics import Z_95, wilson


@pytest.mark.parametrize(("correct", "n"), [(0, 10), (1, 10), (5, 10), (10, 10), (130, 256), (255, 256)])
def test_bounds_solve_the_defining_equation(correct: int, n: int) -> None:
    for bound in wilson(correct, n):
        error_squared = Z_95**2 * bound * (1 - bound) / n
        assert (correct / n - bound) ** 2 == pytest.approx(error_squared, abs=1e-14)


def test_known_figures() -> None:
    assert wilson(5, 10) == pytest.approx((0.2366, 0.7634), abs=1e-4)
    assert wilson(0, 10) == pytest.approx((0.0, 0.2775), abs=1e-4)
    assert wilson(10, 10) == pytest.approx((0.7225, 1.0), abs=1e-4)


def test_stays_within_zero_and_one_and_knows_nothing_of_nothing() -> None:
    assert wilson(0, 0) == (0.0, 1.0)
    for n in range(1, 200):
        low, high = wilson(n, n)
        assert 0.0 < low < high <= 1.0
        low, high = wilson(0, n)
        assert 0.0 <= low < high < 1.0


def test_means_of_shares_are_covered_at_least_as_often_as_means_of_coins() -> None:
    """Numbers from 0 to 1 vary at most as a coin of their mean does; so the interval holds for pass@k and maj@k too."""
    rng = np.random.default_rng(0)
    n, trials = 60, 2000
    draws = rng.beta(0.8, 0.4, (trials, n))
    covered = [low <= 2 / 3 <= high for low, high in (wilson(float(row.sum()), n) for row in draws)]
    assert sum(covered) / trials > 0.95
