"""Means of a few seeds, and what the curricula's benchmark calls reached."""

import math

import pytest

from benchmarks.curricula import EVERY, reached
from benchmarks.student import mean_interval, ratio_interval


def test_the_interval_is_student_s() -> None:
    # A textbook sample: mean 10, s = 2, n = 4, t(0.975, 3) = 3.182.
    values = [8.0, 12.0, 8.5358983848622, 11.4641016151378]
    found = mean_interval(values)
    spread = math.sqrt(sum((v - 10) ** 2 for v in values) / 3)
    assert (found["mean"], found["n"]) == (10.0, 4)
    assert (
        found["high"] - 10 == pytest.approx(3.182 * spread / 2, abs=1e-3) == pytest.approx(10 - found["low"], abs=1e-3)
    )


def test_one_value_has_no_interval() -> None:
    assert mean_interval([0.5]) == {"mean": 0.5, "n": 1}


def test_ratios_are_taken_seed_by_seed_and_averaged_as_factors() -> None:
    found = ratio_interval([2.0, 5.0], [1.0, 10.0])
    assert found["mean"] == 1.0 and found["low"] < 1.0 < found["high"]
    assert ratio_interval([8.0, 16.0], [10.0, 20.0])["mean"] == 0.8


def test_reached_needs_three_evaluations_with_the_mean() -> None:
    steps = [EVERY * (place + 1) for place in range(6)]
    assert reached(steps, [0.95, 0.8, 0.8, 0.9, 0.9, 0.9]) == steps[5]
    assert reached(steps, [0.8, 0.95, 0.9, 0.85, 0.9, 0.9]) == steps[3]
    assert reached(steps, [0.99, 0.99]) is None
    assert reached(steps, [0.89] * 6) is None
