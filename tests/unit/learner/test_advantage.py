"""Group advantages against their definition."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.objective.rewards import OfOneGroup, group_advantages, teaches
from protocol.messages import Group
from shared.config.data import RewardConfig, VerifierConfig
from shared.config.tree import Config, RolloutConfig
from shared.errors import TrainingStopped
from tests import reference_advantages
from tests.support.fakes import tiny_group
from tests.support.steps import judge_of, teaching_samples

GROUPS = {"a": [1.0, 0.0, 0.0, 0.0], "equal": [1.0, 1.0, 1.0, 1.0], "b": [1.0, 1.0, 0.25, 0.0]}
REWARDS = st.lists(st.floats(-5, 5, width=16), min_size=2, max_size=9)


@given(rewards=REWARDS, kind=st.sampled_from(["mean", "std", "rloo"]))
def test_equals_the_definition(rewards: list[float], kind: OfOneGroup) -> None:
    everyone = np.ones(len(rewards), dtype=bool)
    got = group_advantages(np.array(rewards), everyone, kind)
    np.testing.assert_allclose(got, reference_advantages.group_advantages(rewards, kind), rtol=1e-9, atol=1e-9)


@given(rewards=st.lists(st.sampled_from([0.0, 1.0]), min_size=2, max_size=9).filter(any))
def test_maxrl_divides_by_the_mean(rewards: list[float]) -> None:
    got = group_advantages(np.array(rewards), np.ones(len(rewards), dtype=bool), "maxrl")
    np.testing.assert_allclose(got, reference_advantages.group_advantages(rewards, "maxrl"), rtol=1e-12)


@pytest.mark.parametrize("kind", ["mean", "std", "rloo", "maxrl"])
def test_samples_that_are_not_kept_enter_nothing(kind: OfOneGroup) -> None:
    rewards, kept = np.array([1.0, 77.0, 0.0, 1.0]), np.array([True, False, True, True])
    got = group_advantages(rewards, kept, kind)
    assert got[1] == 0.0
    np.testing.assert_allclose(got[kept], reference_advantages.group_advantages([1.0, 0.0, 1.0], kind), rtol=1e-12)


def test_equal_rewards_give_zero_even_over_their_std() -> None:
    everyone = np.ones(3, dtype=bool)
    assert group_advantages(np.array([0.5, 0.5, 0.5]), everyone, "std").tolist() == [0.0, 0.0, 0.0]


def advantages(groups: list[Group], config: Config) -> list[float]:
    return [sample.advantage for sample in teaching_samples(groups, config)]


def test_over_the_standard_deviation_of_the_step() -> None:
    """A group of equal scores counts with zeros, as in the paper, and has no sample here."""
    groups = [tiny_group(scores, [2] * 4, group_id=name) for name, scores in GROUPS.items()]
    expected = reference_advantages.batch_normalised(list(GROUPS.values()))
    got = advantages(groups, Config(reward=RewardConfig(advantage="batch")))
    assert got == pytest.approx(expected[0] + expected[2], rel=1e-9)


def test_several_rewards_are_normalised_before_they_are_combined() -> None:
    """In the second group the scores are equal, so it teaches nothing whatever its lengths are."""
    lengths = {"a": [2, 9, 5, 5], "equal": [3, 3, 3, 3], "b": [8, 2, 2, 4]}
    groups = [tiny_group(scores, lengths[name], group_id=name) for name, scores in GROUPS.items()]
    reward = RewardConfig(advantage="gdpo", length=-0.3)
    config = Config(reward=reward, rollout=RolloutConfig(max_new_tokens=10))
    rewards = [[scores, [count / 10 for count in lengths[name]]] for name, scores in GROUPS.items()]
    expected = reference_advantages.gdpo(rewards, [1.0, -0.3])
    assert advantages(groups, config) == pytest.approx(expected[0] + expected[2], rel=1e-9)


@pytest.mark.parametrize("shaped", ["drop", "train"])
def test_rewards_that_differ_teach_although_their_sum_is_the_same(shaped: str) -> None:
    """No reward is as rare as another, so normalised they are not worth the same."""
    rewards = {
        "tie": {"a": [1.0, 1.0, 0.0, 0.0], "b": [0.0, 0.0, 1.0, 0.0], "c": [0.0, 0.0, 0.0, 1.0]},
        "other": {"a": [1.0, 0.0, 0.0, 0.0], "b": [1.0, 1.0, 0.0, 1.0], "c": [1.0, 1.0, 1.0, 1.0]},
    }
    groups = [
        tiny_group([sum(row) for row in zip(*parts.values(), strict=True)], [2] * 4, group_id=name, rewards=parts)
        for name, parts in rewards.items()
    ]
    config = Config(
        verifier=VerifierConfig(kind="callable", rewards={f"mine.py:{name}": 1.0 for name in "abc"}),
        reward=RewardConfig(advantage="gdpo", shaped_groups=shaped),  # pyright: ignore[reportArgumentType]
    )
    expected = reference_advantages.gdpo([list(parts.values()) for parts in rewards.values()], [1.0] * 3)
    assert advantages(groups, config) == pytest.approx(expected[0] + expected[1], rel=1e-9)
    same = tiny_group([1.0, 1.0], [2, 2], rewards={"a": [1.0, 1.0], "b": [0.0, 0.0], "c": [0.0, 0.0]})
    assert not judge_of(config)(same).teaches


@pytest.mark.parametrize("shaped", ["drop", "train"])
def test_rewards_that_cancel_each_other_once_normalised_teach_nothing(shaped: str) -> None:
    """Both differ. Of the second group, rounding leaves something."""
    config = Config(
        verifier=VerifierConfig(kind="callable", rewards={"mine.py:a": 1.0, "mine.py:b": 1.0}),
        reward=RewardConfig(advantage="gdpo", shaped_groups=shaped),  # pyright: ignore[reportArgumentType]
    )
    for a in ([1.0, 0.0, 0.0, 1.0], [0.1, 0.7, 0.3, 0.9]):
        b = [1.0 - value for value in a]
        scores = [one + other for one, other in zip(a, b, strict=True)]
        group = tiny_group(scores, [2] * 4, rewards={"a": a, "b": b})
        assert not judge_of(config)(group).teaches
        twice = tiny_group(scores, [2] * 4, rewards={"a": a, "b": [0.0, 1.0, 0.0, 0.0]})
        assert judge_of(config)(twice).teaches


def test_replaced_groups_are_not_of_the_step() -> None:
    groups = [tiny_group(GROUPS[name], [2] * 4, group_id=name) for name in ("equal", "a", "b")]
    config = Config(reward=RewardConfig(advantage="batch"), rollout=RolloutConfig(replacement_rounds=1))
    expected = reference_advantages.batch_normalised([GROUPS["a"], GROUPS["b"]])
    assert advantages(groups, config) == pytest.approx(expected[0] + expected[1], rel=1e-9)


def test_a_negative_score_has_no_place_where_the_mean_divides() -> None:
    config = Config(reward=RewardConfig(advantage="maxrl"))
    group = tiny_group([1.0, -0.5], [2, 2], group_id="train/000001/0003")
    with pytest.raises(TrainingStopped, match=r"^Group train/000001/0003 has a score of -0\.5, and reward\.advantage"):
        teaching_samples([group], config)


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
