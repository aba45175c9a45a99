"""Group advantages against their definition."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.objective.rewards import group_advantages, teaches
from tests import reference

REWARDS = st.lists(st.floats(-5, 5, width=16), min_size=2, max_size=9)


@given(rewards=REWARDS, divide_by_std=st.booleans())
def test_equals_the_definition(rewards: list[float], divide_by_std: bool) -> None:
    everyone = np.ones(len(rewards), dtype=bool)
    got = group_advantages(np.array(rewards), everyone, divide_by_std)
    np.testing.assert_allclose(got, reference.group_advantages(rewards, divide_by_std), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("divide_by_std", [False, True])
def test_samples_that_are_not_kept_enter_nothing(divide_by_std: bool) -> None:
    rewards, kept = np.array([1.0, 77.0, 0.0, 1.0]), np.array([True, False, True, True])
    got = group_advantages(rewards, kept, divide_by_std)
    assert got[1] == 0.0
    np.testing.assert_allclose(got[kept], reference.group_advantages([1.0, 0.0, 1.0], divide_by_std), rtol=1e-12)


def test_equal_rewards_give_zero_even_over_their_std() -> None:
    everyone = np.ones(3, dtype=bool)
    assert group_advantages(np.array([0.5, 0.5, 0.5]), everyone, True).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("scores", "kept", "expected"),
    [
        ([1, 0], [1, 1], True),
        ([1, 1, 1], [1, 1, 1], False),
        ([0, 1, 0], [1, 0, 1], False),
        ([0, 1, 0], [0, 1, 0], False),
        ([0, 1], [0, 0], False),
        ([0.0, 0.0, 1e-9], [1, 1, 1], True),
    ],
)
def test_a_group_teaches_if_the_kept_scores_differ(scores: list[float], kept: list[int], expected: bool) -> None:
    assert teaches(np.array(scores), np.array(kept, dtype=bool)) is expected
