"""Draws follow the expected p (1 - p); estimates follow the formulas; state is all there is."""

import json
import math

import numpy as np
import pytest

from learner.curriculum.pass_rate import PassRate
from learner.objective.judged import PassCount
from shared.config.data import CurriculumConfig
from tests.reference import beta_variance

EVEN = CurriculumConfig(explore=0.1, half_life=4.0, prior=4.0)


def curriculum(strata: list[int], config: CurriculumConfig = EVEN, seed: int = 0) -> PassRate:
    return PassRate(strata, seed, config)


def told(chosen: PassRate, results: dict[int, tuple[int, int]]) -> None:
    """Has these tasks sampled, as one step."""
    chosen.in_flight += list(results)
    chosen.observe([PassCount(task=task, right=right, counted=n) for task, (right, n) in results.items()])


def test_before_anything_is_seen_all_tasks_are_as_likely() -> None:
    chosen = curriculum([0, 0, 1, 1])
    assert np.allclose(chosen.probabilities(), 0.25)
    assert chosen.metrics().effective_tasks == pytest.approx(4.0)
    assert math.isnan(chosen.metrics().pass_rate)


def test_estimates_are_those_of_the_formulas_with_fading_and_strata() -> None:
    chosen = curriculum([0, 0, 1, 1, 1])
    told(chosen, {0: (8, 8), 2: (2, 8)})
    told(chosen, {3: (4, 8)})
    fade = 0.5**0.25
    means = [(8 * fade + 1) / (8 * fade + 2), (2 * fade + 4 + 1) / (8 * fade + 8 + 2)]
    counts = [(8 * fade, 8 * fade), (0, 0), (2 * fade, 8 * fade), (4, 8), (0, 0)]
    expected = []
    for stratum, (right, samples) in zip([0, 0, 1, 1, 1], counts, strict=True):
        a, b = 4 * means[stratum] + right, 4 * (1 - means[stratum]) + samples - right
        expected.append(beta_variance(a, b))
    assert np.allclose(chosen.expected_variance(), expected, rtol=1e-9)
    q = 0.9 * np.array(expected) / sum(expected) + 0.1 / 5
    assert np.allclose(chosen.probabilities(), q, rtol=1e-9)
    assert chosen.metrics().effective_tasks == pytest.approx(1 / (q**2).sum())
    assert chosen.metrics().pass_rate == 0.5


def test_tasks_near_one_half_come_more_often_and_the_rest_now_and_then() -> None:
    chosen = curriculum([0, 1, 2, 3, 4])
    told(chosen, {task: (4, 8) if task == 2 else (8, 8) for task in range(5)})
    drawn = np.zeros(5)
    for _ in range(4000):
        drawn[chosen.next(1)] += 1
        chosen.in_flight.clear()
    q = chosen.probabilities()
    assert np.allclose(drawn / 4000, q, atol=4 * np.sqrt(q.max() / 4000))
    assert q[2] == q.max() > 2 * q[0] and q.min() >= 0.1 / 5


def test_what_is_seen_of_some_tasks_is_expected_of_their_like() -> None:
    chosen = curriculum([0] * 4 + [1] * 4)
    told(chosen, {0: (8, 8), 4: (4, 8)})
    q = chosen.probabilities()
    assert q[1] < q[5] and q[1] == q[2] == q[3]


def test_sharpness_narrows_the_choice() -> None:
    effective = []
    for sharpness in (1.0, 3.0):
        chosen = curriculum([0, 1, 2], CurriculumConfig(sharpness=sharpness))
        told(chosen, {0: (8, 8), 1: (4, 8)})
        effective.append(chosen.metrics().effective_tasks)
    assert effective[1] < effective[0]


def test_however_sharp_the_choice_the_most_promising_tasks_share_it() -> None:
    chosen = curriculum([0] * 4 + [1] * 4, CurriculumConfig(sharpness=2000.0, explore=0.1))
    told(chosen, {task: (4, 8) if task > 3 else (8, 8) for task in range(8)})
    assert np.allclose(chosen.probabilities(), [0.1 / 8] * 4 + [0.9 / 4 + 0.1 / 8] * 4)


def test_no_task_twice_in_a_call_nor_while_it_is_sampled() -> None:
    chosen = curriculum([0] * 10)
    first, second = chosen.next(4), chosen.next(6)
    assert sorted(first + second) == list(range(10))


def test_more_tasks_than_there_are() -> None:
    chosen = curriculum([0] * 3)
    drawn = chosen.next(7)
    assert sorted(drawn[:3]) == sorted(drawn[3:6]) == [0, 1, 2]
    chosen.observe([PassCount(task=task, right=1, counted=2) for task in drawn])
    assert chosen.in_flight == []


def test_seeds_draw_differently_and_the_same_seed_the_same() -> None:
    draws = [curriculum([0] * 50, seed=seed).next(10) for seed in (0, 0, 1)]
    assert draws[0] == draws[1] != draws[2]


def test_taken_back_it_goes_on_where_it_was() -> None:
    chosen = curriculum([0, 0, 1, 1, 1])
    told(chosen, {0: (8, 8), 2: (2, 8)})
    chosen.next(2)
    before, take_back = chosen.state_dict(), chosen.way_back()
    for _ in range(2):
        asked = chosen.next(2)
        told(chosen, {3: (4, 8)})
        assert chosen.state_dict() != before
        take_back()
        assert chosen.state_dict() == before
        assert chosen.next(2) == asked
        take_back()


def test_a_state_that_was_saved_stays_as_it_was() -> None:
    chosen = curriculum([0, 0, 1, 1, 1])
    chosen.next(1)
    state = chosen.state_dict()
    spelled = json.dumps(state)
    chosen.next(1)
    assert json.dumps(state) == spelled


def test_saved_and_loaded_it_goes_on_where_it_was() -> None:
    def step(chosen: PassRate, number: int) -> list[int]:
        tasks = chosen.next(4)
        if number:
            due = chosen.in_flight[:4]
            chosen.observe([PassCount(task=t, right=(t * 7 + number) % 9, counted=8) for t in due])
        return tasks

    undisturbed, saved, loaded = (curriculum([task % 3 for task in range(20)]) for _ in range(3))
    for number in range(7):
        step(undisturbed, number)
        step(saved, number)
    told(loaded, {19: (3, 8)})
    loaded.load_state_dict(json.loads(json.dumps(saved.state_dict())))
    assert [step(loaded, n) for n in range(7, 15)] == [step(undisturbed, n) for n in range(7, 15)]
    assert loaded.state_dict() == undisturbed.state_dict()
    assert loaded.metrics() == undisturbed.metrics()
