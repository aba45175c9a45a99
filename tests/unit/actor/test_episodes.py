"""Whole orders with environments: our own engine, real processes, and the learner's figures of what comes back."""

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from actor.engines.hf_engine import HFEngine
from actor.environments.episodes import Episodes
from actor.environments.pool import EnvironmentPool
from actor.rollout import Rollout
from actor.scoring.pool import ScorePool
from learner.objective.batch import all_samples
from learner.objective.turns import turns
from learner.update.forward_pass import whole
from learner.update.publisher import policy_message
from protocol.messages import FilledOrder, Finish, GroupOrder, Order, Outcome, Sampling
from protocol.validate import check_groups
from shared.config.data import VerifierConfig
from shared.config.environment import EnvironmentConfig
from shared.config.tree import Config, RolloutConfig
from shared.model.adapter_file import adapter_bytes
from shared.model.conversation import Call, Conversation
from shared.model.policy import Policy
from shared.model.prompt import Prompter, load_prompter
from shared.process.lease import NoLease
from shared.seeding import derive
from tests.support.fakes import shake, tiny_policy
from tests.support.steps import batch_of, forward_pass_of
from tests.unit.actor.test_agents import Talkative as Written
from tests.unit.shared.test_conversation import HERMES, TOOLS, prompter

pytestmark = pytest.mark.usefixtures("one_thread")

CAP = 90
SOURCE = '''
import time

class Env:
    def reset(self, number, fault="", **columns):
        self.total, self.fault, self.calls = int(number), fault, 0
        return f" The number is {number}." if number != "0" else None

    def add(self, text: str) -> str:
        """
        Adds the length.

        Args:
            text: Whatever.
        """
        self.calls += 1
        if self.fault == "hang" and self.calls == 2:
            time.sleep(600)
        if self.fault == "long":
            return "many words " * 100
        self.total += len(text)
        return f"sum {self.total}"

    def get_reward(self):
        return float(self.total % 5) / 4
'''


class Talkative(Conversation):
    """Every turn calls a tool with what was written: the model needs to have learned nothing."""

    def calls(self, ids: Sequence[int]) -> list[Call]:
        return [("add", {"text": "x" * (sum(ids) % 7)})]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Prompter:
    """The embedded tokenizer with tools."""
    made = prompter(tmp_path_factory.mktemp("tools"), HERMES)
    return load_prompter(Path(made.name), EnvironmentConfig(described=TOOLS))


@pytest.fixture(scope="module")
def policy(model: Prompter) -> Policy:
    found = tiny_policy(Path(model.name))
    shake(found, 2)
    return found


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EnvironmentConfig:
    path = tmp_path_factory.mktemp("env") / "env.py"
    path.write_text(SOURCE)
    return EnvironmentConfig(function=f"{path}:Env", described=TOOLS, max_turns=3, step_limit_s=2.0)


@pytest.fixture(scope="module")
def rollout(policy: Policy, model: Prompter, config: EnvironmentConfig) -> Iterator[Rollout]:
    verifier = VerifierConfig(kind="environment", rewards={"think_tags": 0.5})
    engine = HFEngine(policy, model)
    engine.end_ids = engine.end_ids.new_tensor([*model.end_ids, *range(20, 60)])
    played = Episodes(EnvironmentPool(config), Talkative(model, 3), config, scores=True)
    with closing(ScorePool(verifier)) as scorer, closing(played) as episodes:
        yield Rollout(engine, scorer, NoLease(), model.text, episodes=episodes)


def order(model: Prompter, *faults: str, cap: int = CAP) -> Order:
    groups = tuple(
        GroupOrder(
            group_id=f"train/000000/{index:04d}",
            prompt_ids=np.array(model.prompt_ids(f"Question {index}?"), np.int32),
            columns={"number": str(index), "fault": fault},
            seeds=tuple(derive(5, index, sample) for sample in range(3)),
        )
        for index, fault in enumerate(faults or ("", "", ""))
    )
    sampling = Sampling(temperature=1.0, max_new_tokens=cap)
    return Order(
        order_id="train/000000/u0000", policy_version=0, sampling=sampling, groups=groups, votes=False, teacher=False
    )


def fill(rollout: Rollout, policy: Policy, asked: Order) -> FilledOrder:
    filled = rollout.fill(asked, policy_message(0, adapter_bytes(policy.adapter)), lambda phase: None)
    check_groups(filled)
    return filled


def test_an_order_is_played_turn_by_turn(rollout: Rollout, policy: Policy, model: Prompter) -> None:
    filled = fill(rollout, policy, order(model))
    assert any(turns(group).max() == 3 for group in filled.groups), "max_turns"
    for number, group in enumerate(filled.groups):
        assert group.trained is not None
        first = group.completion_ids[: group.lengths[0]]
        text = model.as_the_model_sees(first.tolist())
        opening = f" The number is {number}." if number else ""
        assert text.startswith(f"{opening}<|im_end|>\n<|im_start|>assistant\n")
        assert all(outcome in (Outcome.CORRECT, Outcome.WRONG, Outcome.TRUNCATED) for outcome in group.outcomes)
        assert set(group.rewards) == {"think_tags"}
        several = turns(group)[0] > 1
        assert ("<|im_start|>tool\nsum" in text) == several


def test_log_probs_are_the_learners(rollout: Rollout, policy: Policy, model: Prompter) -> None:
    """Within the gate, over every sampled token; and the step can be trained on."""
    filled = fill(rollout, policy, order(model))
    config = Config(rollout=RolloutConfig(max_new_tokens=CAP), verifier=VerifierConfig(kind="environment"))
    samples = [sample for group in filled.groups for sample in all_samples(group, np.zeros(3))]
    learner = forward_pass_of(policy, config).recomputed([whole(sample) for sample in samples], 1.0)
    actor = np.concatenate([sample.actor_logprobs[sample.trained] for sample in samples])
    np.testing.assert_allclose(actor, learner, atol=2e-5)
    batch = batch_of([replace(group, rewards={}) for group in filled.groups], policy, config)
    teaching = [sample.sample for sample in batch.samples]
    assert batch.response_tokens == sum(sample.length for sample in teaching)


def test_the_same_order_gives_the_same_bits(rollout: Rollout, policy: Policy, model: Prompter) -> None:
    first, again = (fill(rollout, policy, order(model)) for _ in range(2))
    for one, other in zip(first.groups, again.groups, strict=True):
        assert one.completion_ids.tobytes() == other.completion_ids.tobytes()
        assert one.logprobs.tobytes() == other.logprobs.tobytes()
        assert (one.lengths, one.scores, one.outcomes) == (other.lengths, other.scores, other.outcomes)


def test_an_environment_that_hangs_ends_its_rollouts_alone(rollout: Rollout, policy: Policy, model: Prompter) -> None:
    """In the second turn; the other group has its answers and its rewards as ever."""
    whole_order = fill(rollout, policy, order(model, "", ""))
    filled = fill(rollout, policy, order(model, "", "hang"))
    assert filled.groups[0].completion_ids.tobytes() == whole_order.groups[0].completion_ids.tobytes()
    assert filled.groups[0].scores == whole_order.groups[0].scores
    expected = [
        Outcome.TIMEOUT if count == 3 else outcome
        for count, outcome in zip(turns(whole_order.groups[1]), whole_order.groups[1].outcomes, strict=True)
    ]
    assert list(filled.groups[1].outcomes) == expected and Outcome.TIMEOUT in expected
    assert all(s == 0.0 for s, o in zip(filled.groups[1].scores, expected, strict=True) if o is Outcome.TIMEOUT)


@contextmanager
def with_reward(rollout: Rollout, model: Prompter, file: Path, code: str) -> Iterator[Rollout]:
    """One whose completions `reward` of this code scores too."""
    file.write_text(code)
    verifier = VerifierConfig(kind="environment", rewards={f"{file}:reward": 0.5})
    with closing(ScorePool(verifier)) as scorer:
        yield Rollout(rollout.engine, scorer, NoLease(), model.text, episodes=rollout.episodes)


FAILS = """
def reward(number, log_metric, log_extra, **columns):
    log_metric("seen", 3)
    log_extra("shown", [f"number {one}" for one in number])
    return [float("nan") if one == "0" else 0.25 for one in number]
"""
SHOWS = """
def reward(completions, completion_ids, log_extra, **columns):
    log_extra("text", [str(text.encode()) for text in completions])
    log_extra("ids", completion_ids)
    return [0.0 for _ in completions]
"""


def test_a_named_reward_that_fails_is_no_zero_and_what_it_logs_is_kept(
    rollout: Rollout, policy: Policy, model: Prompter, tmp_path: Path
) -> None:
    with with_reward(rollout, model, tmp_path / "rewards.py", FAILS) as scored:
        failed, lost = fill(scored, policy, order(model, "", "hang")).groups
    assert set(failed.outcomes) == {Outcome.ERROR} and set(failed.scores) == {0.0}
    assert Outcome.TIMEOUT in lost.outcomes
    for number, group in enumerate((failed, lost)):
        assert group.metrics == {"seen": 3.0}
        assert group.extras == {"shown": (f"number {number}",) * 3}


def test_functions_get_all_turns_and_what_is_between_them(
    rollout: Rollout, policy: Policy, model: Prompter, tmp_path: Path
) -> None:
    with with_reward(rollout, model, tmp_path / "rewards.py", SHOWS) as scored:
        group = fill(scored, policy, order(model, cap=60)).groups[0]
    assert group.trained is not None and turns(group).max() > 1
    ends = np.cumsum(group.lengths)[:-1]
    for place, (ids, trained) in enumerate(
        zip(np.split(group.completion_ids, ends), np.split(group.trained, ends), strict=True)
    ):
        written = ids[trained.argmax() :].tolist()
        assert group.extras["text"][place] == str(model.text(written).encode())[:300]
        assert group.extras["ids"][place] == str(written)[:300]


def test_an_answer_without_room_truncates(rollout: Rollout, policy: Policy, model: Prompter) -> None:
    filled = fill(rollout, policy, order(model, "long"))
    group = filled.groups[0]
    assert set(group.finishes) == {Finish.LENGTH} and turns(group).tolist() == [1, 1, 1]
    assert all(outcome is Outcome.TRUNCATED for outcome in group.outcomes)


def test_a_reset_that_says_more_than_fits_abstains(rollout: Rollout, policy: Policy, model: Prompter) -> None:
    assert set(fill(rollout, policy, order(model, cap=4)).groups[0].outcomes) == {Outcome.ABSTAIN}


def test_a_call_that_gets_no_answer_is_no_final_answer(
    rollout: Rollout, policy: Policy, model: Prompter, config: EnvironmentConfig
) -> None:
    """Though its last argument is the gold answer."""
    talkative, once = dataclasses.replace(model, tokenizer=Written(model.tokenizer)), replace(config, max_turns=1)
    asked = order(model, "")
    groups = tuple(replace(group, columns={**group.columns, "answer": "1"}) for group in asked.groups)
    played = Episodes(EnvironmentPool(once), Conversation(talkative, 1), once, scores=False)
    with closing(ScorePool(VerifierConfig(kind="gsm8k"))) as scorer, closing(played) as episodes:
        scored = Rollout(rollout.engine, scorer, NoLease(), talkative.text, episodes=episodes)
        outcomes = fill(scored, policy, replace(asked, groups=groups)).groups[0].outcomes
    assert set(outcomes) == {Outcome.UNPARSABLE}


@pytest.mark.parametrize("cap", [20, 40, 60])
def test_no_completion_is_longer_than_the_cap(rollout: Rollout, policy: Policy, model: Prompter, cap: int) -> None:
    filled = fill(rollout, policy, order(model, cap=cap))
    assert max(length for group in filled.groups for length in group.lengths) <= cap
