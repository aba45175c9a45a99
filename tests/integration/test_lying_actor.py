"""An actor with a key of its own says false things: it is found, named, cut off, and the run ends as without it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actor.rollout import Rollout
from benchmarks.hostile_actors import SETTINGS, TEACHING, side_by_side
from benchmarks.hostile_kinds import Kind, false_logprobs, false_rewards
from launch.__main__ import main
from launch.commands.in_process import local_actor
from launch.presets.load import load_config
from learner.orders.audit import Chosen, Claim
from learner.orders.orders import build_orders
from learner.orders.second_scores import ScoreCheck, SecondScores
from learner.tasks.tasks import Task
from learner.wiring import load_model
from protocol.messages import FilledOrder, Finish, Outcome, Sampling
from shared.base.cache import cached_base
from shared.config.tree import Config
from shared.model.prompt import Prompter, load_prompter
from tests.support.fakes import toy_policy
from tests.support.wire_examples import group, timings

pytestmark = pytest.mark.timeout(300)
TRIES = 3
STEPS = 24
"""So many that the liar, which starts when the run does, fills some of its groups on a busy machine too."""


@pytest.fixture(scope="module")
def config() -> Config:
    return load_config("embedded", [*SETTINGS, *TEACHING, f"run.steps={STEPS}"])


@pytest.fixture(scope="module")
def honest(config: Config) -> Iterator[Rollout]:
    with local_actor(config) as actor:
        yield actor.rollout


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (false_rewards, "and the learner's verifier finds"),
        (false_logprobs, "the log-probs of group"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_run_with_a_liar_ends_with_the_adapter_of_its_twin(
    kind: Kind, words: str, config: Config, honest: Rollout, tmp_path: Path
) -> None:
    found, folder = run_with_a_lie(tmp_path, config, kind, honest)
    assert found["undisturbed"]["exit"] == found["disturbed"]["exit"] == 0, found
    assert found["same_adapter"] and words in found["hostile"]["revoked_for"], found
    assert 0 < found["hostile"]["false_groups"] <= config.rollout.prompts, "all of them in one step"
    log = (folder / "disturbed" / "logs" / "learner.log").read_text()
    assert log.count("WARNING learner Actor evil lied and is expelled: ") == 1 and words in log


def run_with_a_lie(folder: Path, config: Config, kind: Kind, honest: Rollout) -> tuple[dict[str, Any], Path]:
    """Of a run in which a lie was recorded. On a busy machine the other actor may fill all groups first."""
    for number in range(TRIES):
        one = folder / str(number)
        found = side_by_side(one, config, load_model(config).expected(), kind, honest)
        if found["hostile"]["false_groups"]:
            return found, one
    raise AssertionError(f"in {TRIES} runs no lie came before the true group")


# --- the verifier, once more


def answered(prompter: Prompter, *texts: str) -> Chosen:
    """A group for the sum of 40 and 2 with these texts, each of which is claimed to be right."""
    ids = [np.array(prompter.ids(text), np.int32) for text in texts]
    question = "What is 40 + 2?"
    task = Task(
        prompt_ids=np.array(prompter.prompt_ids(question), np.int32), columns={"question": question, "answer": "42"}
    )
    (order,) = build_orders(
        [task],
        seed=0,
        lane="train",
        step=0,
        first_slot=0,
        samples=len(texts),
        version=0,
        sampling=Sampling(temperature=1.0, max_new_tokens=64),
        groups_per_order=1,
    )
    claimed = group(
        group_id=order.groups[0].group_id,
        prompt_ids=task.prompt_ids,
        completion_ids=np.concatenate(ids),
        lengths=tuple(map(len, ids)),
        logprobs=np.full(sum(map(len, ids)), -1.0, np.float32),
        entropies=None,
        finishes=(Finish.STOP,) * len(ids),
        outcomes=(Outcome.CORRECT,) * len(ids),
        scores=(1.0,) * len(ids),
        votes=None,
    )
    filled = FilledOrder(
        order_id=order.order_id, policy_version=0, adapter_sha256="a" * 64, groups=(claimed,), timings=timings()
    )
    return Chosen(claim=Claim(actor_id="evil", order=order, filled=filled, policy=toy_policy(0)), place=0)


def test_the_process_that_scores_again_finds_a_false_score_and_may_be_killed(tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert main(["run", "embedded", "--prepare", "--out", str(out)]) == 0
    prompter = load_prompter(cached_base(load_config("embedded", []).model).folder)
    beats = list[int]()
    scores = SecondScores(out, lambda: beats.append(1))
    check = ScoreCheck(scores)
    true, false = answered(prompter, "#### 42", "So it is #### 42"), answered(prompter, "#### 42", "#### 41")
    try:
        assert check.lies([true]) == [] and beats, "the link is served while it starts"
        (lie,) = check.lies([true, false])
        assert lie.actor_id == "evil"
        assert "completion 1 of group train/000000/0000 came as 'correct' with a score of 1, and" in lie.evidence
        assert "the learner's verifier finds 'wrong' and 0" in lie.evidence
        assert scores.process
        scores.process.kill()
        assert check.lies([false]) == [], "unchecked this time"
        assert len(check.lies([false])) == 1, "by a new process"
    finally:
        scores.close()
