"""The paired interval against all resamples of few tasks and the normal law of many; the sign test against counting."""

from itertools import product

import numpy as np
import pytest

from shared.paired import Difference, paired_bootstrap, sign_test


def every_resample(differences: list[float]) -> np.ndarray:
    """The bootstrap distribution itself: the means of all n^n resamples."""
    return np.array([np.mean(chosen) for chosen in product(differences, repeat=len(differences))])


@pytest.mark.parametrize("a", [[1, 1, 0, 0, 1], [1, 0, 1, 1, 0], [0.25, 0.5, 1.0, 0.0, 0.75]])
def test_the_interval_is_that_of_all_resamples(a: list[float]) -> None:
    b = [0.0, 1.0, 0.0, 0.5, 0.0]
    found = paired_bootstrap(a, b)
    means = every_resample([x - y for x, y in zip(a, b, strict=True)])
    low, high = np.quantile(means, [0.025, 0.975])
    assert found.mean == pytest.approx(means.mean(), abs=1e-12)
    # Quantiles of 10 000 draws: next to the exact one in the list of values that occur.
    assert np.mean((means > min(found.low, low)) & (means < max(found.low, low))) < 0.01
    assert np.mean((means > min(found.high, high)) & (means < max(found.high, high))) < 0.01


def test_many_tasks_give_the_normal_interval() -> None:
    rng = np.random.default_rng(1)
    a, b = rng.random(2000) < 0.7, rng.random(2000) < 0.6
    found = paired_bootstrap(a.tolist(), b.tolist())
    differences = a.astype(float) - b.astype(float)
    error = differences.std() / np.sqrt(len(differences))
    assert found.low == pytest.approx(differences.mean() - 1.96 * error, abs=0.05 * error)
    assert found.high == pytest.approx(differences.mean() + 1.96 * error, abs=0.05 * error)
    assert found.certain and found.n == 2000


def test_pairing_takes_out_what_is_hard_for_both() -> None:
    """b is right wherever a is, and on one task in twenty besides: unpaired intervals of 0.5 and 0.55 would overlap."""
    a = [float(i < 100) for i in range(200)]
    b = [float(i < 110) for i in range(200)]
    found = paired_bootstrap(b, a)
    assert found.mean == pytest.approx(0.05) and found.low > 0.015 and found.high < 0.09


def test_the_other_way_round_is_the_mirror_image_and_equal_policies_differ_by_nothing() -> None:
    a, b = [1.0, 0.0, 1.0, 1.0, 0.0, 1.0], [0.0, 0.0, 1.0, 0.0, 1.0, 1.0]
    there, back = paired_bootstrap(a, b), paired_bootstrap(b, a)
    assert (there.mean, there.low, there.high) == pytest.approx((-back.mean, -back.high, -back.low), abs=1e-12)
    assert paired_bootstrap(a, a) == Difference(mean=0.0, low=0.0, high=0.0, n=6)
    assert not paired_bootstrap(a, a).certain


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(3)
    covered = 0
    for _ in range(200):
        a, b = rng.random(100) < 0.6, rng.random(100) < 0.5
        found = paired_bootstrap(a.tolist(), b.tolist(), resamples=500)
        covered += found.low <= 0.1 <= found.high
    assert 0.90 <= covered / 200 <= 0.99


@pytest.mark.parametrize(("up", "down"), [(0, 0), (1, 0), (5, 0), (3, 4), (7, 2), (6, 6)])
def test_the_sign_test_counts_outcomes_at_least_as_lopsided(up: int, down: int) -> None:
    flips = list(product([0, 1], repeat=up + down))
    lopsided = sum(abs(2 * sum(f) - len(f)) >= abs(up - down) for f in flips) / len(flips)
    assert sign_test(up, down) == pytest.approx(lopsided)
