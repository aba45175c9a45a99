"""Bootstrap, score interval and sign test, each against its definition; and how often equal policies get a verdict."""

from itertools import product
from statistics import NormalDist

import numpy as np
import pytest

from shared.statistics import MANY, Difference, paired, paired_bootstrap, sign_test, tango


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


def likeliest(up: int, down: int, n: int, difference: float) -> float:
    """The share of `down` with the largest likelihood among those that leave this difference, by looking at many."""
    share = np.linspace(max(0.0, -difference), (1 - difference) / 2, 20_001)
    with np.errstate(divide="ignore", invalid="ignore"):
        terms = [(up, share + difference), (down, share), (n - up - down, 1 - difference - 2 * share)]
        likelihood = sum(np.where(count > 0, count * np.log(np.maximum(p, 0)), 0.0) for count, p in terms)
    return float(share[np.argmax(likelihood)])


@pytest.mark.parametrize(("up", "down", "n"), [(4, 0, 256), (5, 3, 30), (12, 2, 50), (1, 0, 10), (0, 0, 20)])
def test_the_ends_of_the_score_interval_are_where_the_test_just_rejects(up: int, down: int, n: int) -> None:
    z = NormalDist().inv_cdf(0.975)
    for end in tango(up, down, n, 0.95):
        share = likeliest(up, down, n, end)
        error = np.sqrt(n * (2 * share + end * (1 - end)))
        assert abs(up - down - n * end) / error == pytest.approx(z, rel=2e-3)


def test_no_flips_at_all_leave_a_difference_possible() -> None:
    found = paired([1.0] * 20, [1.0] * 20)
    assert (found.mean, found.p, found.certain) == (0.0, 1.0, False)
    assert found.low < -0.1 and found.high > 0.1


def zero_one(up: int, down: int, n: int) -> tuple[list[float], list[float]]:
    """Outcomes of two policies with so many flips."""
    a = [1.0] * up + [0.0] * (n - up)
    b = [0.0] * up + [1.0] * down + [0.0] * (n - up - down)
    return a, b


def test_the_verdict_on_zero_one_outcomes_is_the_sign_tests() -> None:
    for up, down in product(range(16), repeat=2):
        for level in (0.95, 0.975):
            found = paired(*zero_one(up, down, 256), level)
            assert found.certain == (sign_test(up, down) <= 1 - level), (up, down)
            assert found.low <= found.mean <= found.high and found.p == sign_test(up, down)


@pytest.mark.parametrize("draws", [1, 2, pytest.param(4, marks=pytest.mark.long)])
def test_equal_policies_are_told_apart_no_more_often_than_the_level_says(draws: int) -> None:
    """Both right with the same chance on each task; most tasks are easy, so that few differ."""
    rng = np.random.default_rng(draws)
    wrong, rounds = 0, 400
    for _ in range(rounds):
        chance = np.where(rng.random(100) < 0.9, 0.995, 0.5)
        a, b = (rng.binomial(draws, chance) / draws for _ in range(2))
        wrong += paired(a.tolist(), b.tolist()).certain
    assert wrong / rounds <= 0.05


def test_many_tasks_that_differ_by_many_amounts_are_left_to_the_bootstrap() -> None:
    rng = np.random.default_rng(5)
    a, b = rng.random(MANY).tolist(), rng.random(MANY).tolist()
    assert paired(a, b) == paired_bootstrap(a, b) and paired(a, b).p is None
    assert paired(a[:-1], b[:-1]).p is not None
