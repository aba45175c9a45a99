"""What a sample is worth: parts by hand, kept apart, and logged by name."""

import numpy as np
import pytest
from msgspec import structs

from launch.presets.load import load_config
from learner.objective.judged import Admission
from learner.reports.step_metrics import reward_means
from protocol.messages import Finish, Outcome
from shared.config.data import RewardConfig, VerifierConfig
from shared.config.tree import Config, RolloutConfig
from shared.errors import ConfigError, TrainingStopped
from tests.support.fakes import tiny_group
from tests.support.steps import judge_of, judged, teaches

CONFIG = Config(
    rollout=RolloutConfig(max_new_tokens=10),
    verifier=VerifierConfig(rewards={"think_tags": 0.5, "mine.py:brevity": -2.0}),
    reward=RewardConfig(truncated=-0.25, length=-1.0, length_free=4),
)
GROUP = tiny_group(
    [1.0, 0.0, 1.0],
    [3, 7, 10],
    finishes=[Finish.STOP, Finish.STOP, Finish.LENGTH],
    rewards={"think_tags": [1.0, 1.0, 0.0], "brevity": [0.0, 0.25, 1.0]},
)


def test_rewards_that_are_the_score_are_not_added_again() -> None:
    several = VerifierConfig(kind="callable", rewards=CONFIG.verifier.rewards)
    found = judge_of(structs.replace(CONFIG, verifier=several, reward=RewardConfig()))(GROUP)
    assert found.rewards.tolist() == list(GROUP.scores) and found.parts["brevity"].tolist() == [0.0, 0.25, 1.0]
    one = structs.replace(several, function="mine.py:right")
    found = judge_of(structs.replace(CONFIG, verifier=one, reward=RewardConfig()))(GROUP)
    assert found.rewards.tolist() == pytest.approx([1.5, 0.0, -1.0])


def test_the_parts_add_up_with_their_weights() -> None:
    by_hand = [
        1.0 + 0.5 * 1.0 - 2.0 * 0.0 - 0.0,
        0.0 + 0.5 * 1.0 - 2.0 * 0.25 - (7 - 4) / (10 - 4),
        1.0 + 0.5 * 0.0 - 2.0 * 1.0 - 1.0 - 0.25,
    ]
    assert judge_of(CONFIG)(GROUP).rewards.tolist() == pytest.approx(by_hand)


def test_each_part_is_logged_unweighted_by_its_name() -> None:
    parts = judge_of(CONFIG)(GROUP).parts
    assert list(parts) == ["score", "think_tags", "brevity", "length"]
    assert parts["length"].tolist() == [0.0, 0.5, 1.0]
    means = reward_means(judged([GROUP, structs.replace(GROUP, scores=(0.0, 0.0, 0.0))], CONFIG))
    assert means == pytest.approx({"score": 1 / 3, "think_tags": 2 / 3, "brevity": 5 / 12, "length": 0.5})


def test_the_score_alone_has_no_parts() -> None:
    plain = tiny_group([1.0, 0.0], [2, 2])
    assert judge_of(Config())(plain).parts == {} and reward_means(judged([plain], Config())) == {}
    assert judge_of(Config())(plain).rewards.tolist() == [1.0, 0.0]


def test_length_beyond_the_cap_or_without_room_stays_between_its_bounds() -> None:
    tight = Config(rollout=RolloutConfig(max_new_tokens=3), reward=RewardConfig(length=1.0, length_free=3))
    assert judge_of(tight)(tiny_group([0.0, 0.0], [3, 9])).rewards.tolist() == [0.0, 1.0]


@pytest.mark.parametrize(("shaped", "expected"), [("drop", False), ("train", True)])
def test_whether_form_alone_teaches_is_configured(shaped: str, expected: bool) -> None:
    config = Config(
        verifier=VerifierConfig(rewards={"think_tags": 0.5}),
        reward=RewardConfig(shaped_groups=shaped),  # pyright: ignore[reportArgumentType]
    )
    wrong = tiny_group([0.0, 0.0], [2, 2], rewards={"think_tags": [1.0, 0.0]})
    assert teaches(wrong, config) is expected
    alike = tiny_group([0.0, 0.0], [2, 2], rewards={"think_tags": [1.0, 1.0]})
    assert not teaches(alike, config)


def test_a_group_with_other_rewards_is_refused_before_it_is_kept() -> None:
    for stray in (tiny_group([1.0, 0.0], [2, 2]), structs.replace(GROUP, rewards=GROUP.rewards | {"x": (0.0,) * 3})):
        with pytest.raises(TrainingStopped, match="start the actor with this run's"):
            Admission.of(CONFIG.verifier, CONFIG.reward)(stray)
    assert np.all(judge_of(CONFIG)(GROUP).kept)
    assert GROUP.outcomes[0] is Outcome.CORRECT


@pytest.mark.parametrize(
    ("rewards", "words"),
    [
        ("{tags = 1.0}", "'tags', expected think_tags, answer_tags or a function"),
        ('{"a.py:mean" = 1.0}', "cannot be called 'mean'"),
        ('{"a.py:std" = 1.0}', "cannot be called 'std'"),
        ('{"a.py:score" = 1.0}', "cannot be called 'score'"),
        ('{"a.py:x y" = 1.0}', "cannot be called 'x y'"),
        ('{"a.py:x" = 1.0, "b.py:x" = 1.0}', "two functions of the same name"),
        ("{think_tags = nan}", "finite"),
        ('{think_tags = "much"}', "verifier.rewards"),
    ],
)
def test_what_cannot_be_told_apart_or_is_unknown_is_refused(rewards: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config("embedded", [f"verifier.rewards={rewards}"])


def test_rewards_are_read_from_one_table() -> None:
    config = load_config("embedded", ['verifier.rewards={think_tags = 0.5, "a.py:x" = 2}'])
    assert config.verifier.rewards == {"think_tags": 0.5, "a.py:x": 2.0}
