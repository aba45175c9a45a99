"""pass@k and maj@k against every subset, closed forms, and the limit of many draws."""

from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from itertools import combinations, product
from math import comb

import numpy as np
import pytest

from shared.statistics import maj_at_k, pass_at_k, sizes

RIGHT, SILENT = "right", ""


def answers(right: int, wrong: Sequence[int], silent: int) -> list[str]:
    """One string for each final answer."""
    return [RIGHT] * right + [f"w{i}" for i, size in enumerate(wrong) for _ in range(size)] + [SILENT] * silent


def majority(chosen: Sequence[str]) -> float:
    """What a vote of these is worth, said in the plainest way."""
    votes = Counter(answer for answer in chosen if answer != SILENT)
    winners = [answer for answer, count in votes.items() if count == max(votes.values())]
    return winners.count(RIGHT) / len(winners) if winners else 0.0


@pytest.mark.parametrize("n", range(1, 9))
def test_pass_at_k_is_the_mean_over_all_subsets(n: int) -> None:
    for right, k in product(range(n + 1), range(1, n + 1)):
        drawn = [True] * right + [False] * (n - right)
        expected = np.mean([any(chosen) for chosen in combinations(drawn, k)])
        assert pass_at_k(n, right, k) == pytest.approx(expected, abs=1e-15)


def test_pass_at_k_in_closed_form() -> None:
    assert pass_at_k(10, 3, 1) == pytest.approx(0.3)
    assert pass_at_k(10, 0, 5) == 0.0 and pass_at_k(10, 10, 1) == pass_at_k(10, 6, 5) == 1.0
    assert pass_at_k(4, 1, 2) == pytest.approx(1 - 3 * 2 / (4 * 3))
    # Large enough that the binomials have hundreds of digits.
    assert pass_at_k(4096, 1, 1024) == pytest.approx(0.25)


def test_pass_at_k_is_unbiased_where_the_plug_in_estimate_is_not() -> None:
    p, n, k = 0.3, 6, 4
    weights = [comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)]
    truth = 1 - (1 - p) ** k
    assert sum(w * pass_at_k(n, c, k) for c, w in enumerate(weights)) == pytest.approx(truth, abs=1e-12)
    assert abs(sum(w * (1 - (1 - c / n) ** k) for c, w in enumerate(weights)) - truth) > 0.02


COUNTS = [
    (3, (), 0),
    (0, (2, 1), 1),
    (2, (2,), 0),
    (1, (1, 1, 1), 0),
    (3, (2, 2), 1),
    (2, (3, 1), 2),
    (4, (3, 2, 1), 0),
    (1, (4,), 3),
    (0, (), 4),
    (5, (1, 1, 1), 2),
]


@pytest.mark.parametrize(("right", "wrong", "silent"), COUNTS)
def test_maj_at_k_is_the_mean_over_all_subsets(right: int, wrong: tuple[int, ...], silent: int) -> None:
    drawn = answers(right, wrong, silent)
    for k in range(1, len(drawn) + 1):
        expected = np.mean([majority(chosen) for chosen in combinations(drawn, k)])
        assert maj_at_k(right, wrong, silent, k) == pytest.approx(expected, abs=1e-10)


def test_maj_at_k_in_closed_form() -> None:
    """One vote is the share of right answers; two answers of equal weight are worth a half; odd k is a binomial sum."""
    assert maj_at_k(3, (4, 2), 1, 1) == pytest.approx(0.3)
    assert maj_at_k(8, (8,), 0, 7) == pytest.approx(0.5)
    right, wrong, k = 30, 20, 9
    hypergeometric = sum(comb(right, v) * comb(wrong, k - v) for v in range(5, k + 1)) / comb(right + wrong, k)
    assert maj_at_k(right, (wrong,), 0, k) == pytest.approx(hypergeometric, abs=1e-10)


def test_maj_at_k_does_not_care_for_order_and_never_beats_pass_at_k() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        right, silent = map(int, rng.integers(0, 6, 2))
        wrong = [int(size) for size in rng.integers(1, 5, rng.integers(0, 5))]
        n = right + sum(wrong) + silent
        for k in sizes(n) if n else []:
            value = maj_at_k(right, wrong, silent, k)
            assert value == maj_at_k(right, wrong[::-1], silent, k)
            assert 0.0 <= value <= pass_at_k(n, right, k) + 1e-10


def counted(right: int, wrong: Sequence[int], silent: int, k: int) -> Fraction:
    """Exact, in whole numbers: the ways to choose, by votes cast and by ties."""
    won = Fraction(0)
    for votes in range(1, min(right, k) + 1):
        ways = {(cast, 0): comb(silent, cast) for cast in range(k - votes + 1)}
        for size in wrong:
            grown = Counter[tuple[int, int]]()
            for (cast, ties), count in ways.items():
                for got in range(min(size, votes, k - votes - cast) + 1):
                    grown[cast + got, ties + (got == votes)] += count * comb(size, got)
            ways = grown
        won += sum(Fraction(comb(right, votes) * n, 1 + t) for (cast, t), n in ways.items() if cast == k - votes)
    return won / comb(right + sum(wrong) + silent, k)


@pytest.mark.parametrize(
    ("right", "wrong", "silent"),
    [(9, (8, 6, 5, 3, 2, 2, 1, 1, 1), 2), (2, (1,) * 30, 0), (20, (30, 10), 4), (6, (6,) * 6, 0), (12, (), 28)],
)
def test_maj_at_k_of_many_draws_is_that_of_whole_numbers(right: int, wrong: tuple[int, ...], silent: int) -> None:
    for k in sizes(right + sum(wrong) + silent):
        exact = float(counted(right, wrong, silent, k))
        assert maj_at_k(right, wrong, silent, k) == pytest.approx(exact, abs=1e-10)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("wrong", [(1,) * 1023, (32,) * 31])
def test_a_thousand_draws_are_counted_in_good_time(wrong: tuple[int, ...]) -> None:
    """Answers with as many votes each are worth the same. Whole numbers would take minutes for the second."""
    expected = 1 / (1 + len(wrong))
    found = [maj_at_k(wrong[0], wrong, 0, k) for k in sizes(1024)]
    assert found == pytest.approx([expected] * len(found), abs=1e-10)


def test_sizes_are_powers_of_two_and_the_whole() -> None:
    assert [sizes(n) for n in (1, 2, 3, 8, 12)] == [[1], [1, 2], [1, 2, 3], [1, 2, 4, 8], [1, 2, 4, 8, 12]]
