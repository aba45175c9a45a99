"""Whole orders with agents: our own engine, real processes and sockets, and the learner's view of what comes back."""

import dataclasses
import json
import re
import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from actor.engines.hf_engine import HFEngine
from actor.environments.agents import Agents
from actor.environments.pool import EnvironmentPool
from actor.rollout import Rollout
from actor.scoring.pool import ScorePool
from learner.objective.batch import all_samples
from learner.objective.turns import by_completion, pieces, trained_tokens, turns
from learner.update.forward_pass import whole
from learner.update.publisher import policy_message
from protocol.messages import FilledOrder, Finish, Group, GroupOrder, Order, Outcome, Sampling
from protocol.validate import check_groups
from shared.config.data import VerifierConfig, VerifierKind
from shared.config.environment import EnvironmentConfig
from shared.config.tree import Config, RolloutConfig
from shared.errors import ModelError
from shared.model.adapter_file import adapter_bytes
from shared.model.policy import Policy
from shared.model.prompt import Prompter, load_prompter
from shared.process.lease import NoLease
from shared.seeding import derive
from tests.support.fakes import shake, tiny_policy
from tests.support.steps import batch_of, forward_pass_of
from tests.unit.shared.test_conversation import HERMES, prompter

pytestmark = pytest.mark.usefixtures("one_thread")

CAP = 160
SOURCE = '''
import json, urllib.error, urllib.request

TYPES = {"type": "object", "properties": {"left": {"type": "integer"}, "right": {"type": "integer"}}}
ADD = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": TYPES}}

def call(base_url, api_key, messages, tools=(ADD,)):
    """The message and why it ended; or the status and what was refused."""
    data = json.dumps({"messages": messages, "tools": list(tools)}).encode()
    request = urllib.request.Request(base_url + "/chat/completions", data, {"Authorization": f"Bearer {api_key}"})
    try:
        with urllib.request.urlopen(request) as reply:
            choice = json.loads(reply.read())["choices"][0]
            return choice["message"], choice["finish_reason"]
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())["error"]

def solve(base_url, api_key, left, right, turns="2", fault="", **columns):
    """Calls the tool, or is told to try again. The reward follows from what was called."""
    messages = [{"role": "user", "content": f"What is {left} plus {right}?"}]
    total = 0
    for turn in range(int(turns)):
        if fault == f"rewrite {turn}":
            edited = [{"role": "user", "content": "Another question."}, *messages[1:]]
            status, error = call(base_url, api_key, edited)
            assert status == 400 and error["code"] == "history_rewritten", error
            assert "Message 0 is of user 'Another question.'" in error["message"], error
        if fault == f"tools {turn}":
            assert "The tools are not those" in call(base_url, api_key, messages, [])[1]["message"]
        if fault == f"again {turn}":
            for _ in range(20):
                assert call(base_url, api_key, messages[:1])[0] == 400
        if fault == f"long {turn}":
            messages[-1]["content"] += " and more" * 400
        if fault == f"raise {turn}":
            raise ValueError("on purpose")
        reply, reason = call(base_url, api_key, messages)
        if reply == 400:
            raise RuntimeError(reason["message"])
        messages.append(reply)
        for asked in reply.get("tool_calls", ()):
            said = sum(json.loads(asked["function"]["arguments"]).values())
            messages.append({"role": "tool", "tool_call_id": asked["id"], "content": str(said)})
            total += said
        if not reply.get("tool_calls"):
            messages.append({"role": "user", "content": "Try again."})
    return total % 5 / 4

def silent(base_url, api_key, **columns):
    return 1.0

def length(completions, **columns):
    return [float(len(one)) for one in completions]
'''


class Talkative:
    """A tokenizer that shows every turn of two tokens and more as a call, and a thought of the same call before it: the
    model needs to have learned nothing."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)

    def __call__(self, *given: Any, **options: Any) -> Any:
        return self.tokenizer(*given, **options)

    def decode(self, ids: list[int], **options: Any) -> str:
        if len(ids) < 2:
            return self.tokenizer.decode(ids, **options)
        call = {"name": "add", "arguments": {"left": sum(ids), "right": 1}}
        written = f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
        return f"<think>Maybe {written}</think>So: {written}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(prompter(tmp_path_factory.mktemp("tools"), HERMES).name)


@pytest.fixture(scope="module")
def model(folder: Path) -> Prompter:
    return load_prompter(folder, EnvironmentConfig(kind="agent"))


@pytest.fixture(scope="module")
def policy(folder: Path) -> Policy:
    found = tiny_policy(folder)
    shake(found, 2)
    return found


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("agent") / "agent.py"
    path.write_text(SOURCE)
    return path


@pytest.fixture(scope="module")
def engine(policy: Policy, model: Prompter) -> HFEngine:
    """Of which turns are short: many tokens end one."""
    engine = HFEngine(policy, model)
    engine.end_ids = engine.end_ids.new_tensor([*model.end_ids, *range(20, 60)])
    return engine


@contextmanager
def opened(
    engine: HFEngine, model: Prompter, source: Path, name: str = "solve", kind: VerifierKind = "environment"
) -> Iterator[Rollout]:
    verifier = VerifierConfig(kind=kind, function=f"{source}:length", rewards={"think_tags": 0.5})
    config = EnvironmentConfig(kind="agent", function=f"{source}:{name}", max_turns=3, step_limit_s=30.0)
    talkative = dataclasses.replace(model, tokenizer=Talkative(model.tokenizer))
    agents = Agents(EnvironmentPool(config), talkative, config, scores=kind == "environment")
    with closing(ScorePool(verifier)) as scorer, closing(agents):
        yield Rollout(engine, scorer, NoLease(), model.text, episodes=agents)


@pytest.fixture(scope="module")
def rollout(engine: HFEngine, model: Prompter, source: Path) -> Iterator[Rollout]:
    with opened(engine, model, source) as made:
        yield made


def order(model: Prompter, *columns: dict[str, str], cap: int = CAP) -> Order:
    groups = tuple(
        GroupOrder(
            group_id=f"train/000000/{index:04d}",
            prompt_ids=np.array(model.prompt_ids("is not asked"), np.int32),
            columns={"left": str(index + 2), "right": "3", **given},
            seeds=tuple(derive(5, index, sample) for sample in range(3)),
        )
        for index, given in enumerate(columns or ({}, {}, {}))
    )
    sampling = Sampling(temperature=1.0, max_new_tokens=cap)
    return Order(
        order_id="train/000000/u0000", policy_version=0, sampling=sampling, groups=groups, votes=False, teacher=False
    )


def fill(rollout: Rollout, policy: Policy, asked: Order) -> FilledOrder:
    filled = rollout.fill(asked, policy_message(0, adapter_bytes(policy.adapter)), lambda phase: None)
    check_groups(filled)
    return filled


def shown(model: Prompter, group: Group) -> list[list[tuple[bool, str]]]:
    """The pieces of each completion as text: whether it was sampled, and what it says."""
    rows = zip(by_completion(group, group.completion_ids), by_completion(group, trained_tokens(group)), strict=True)
    return [
        [(sampled, model.as_the_model_sees(ids[where].tolist())) for sampled, where in pieces(mask)]
        for ids, mask in rows
    ]


def same_bits(one: Group, other: Group) -> bool:
    arrays = zip((one.completion_ids, one.logprobs), (other.completion_ids, other.logprobs), strict=True)
    return all(a.tobytes() == b.tobytes() for a, b in arrays) and (one.scores, one.outcomes) == (
        other.scores,
        other.outcomes,
    )


def unharmed(one: Group, other: Group) -> bool:
    """The same, but for the last bits of log-probs: fewer rows were decoded together."""
    same = one.completion_ids.tobytes() == other.completion_ids.tobytes()
    return same and np.allclose(one.logprobs, other.logprobs, atol=1e-5) and one.scores == other.scores


def test_a_rollout_is_what_the_template_shows_and_calls_are_read(
    rollout: Rollout, policy: Policy, model: Prompter
) -> None:
    """The prompt is one token, and what the agent and its tool say stands between the turns as it should."""
    filled = fill(rollout, policy, order(model))
    called = 0
    for number, group in enumerate(filled.groups):
        assert model.as_the_model_sees(group.prompt_ids.tolist()) == "<|im_start|>"
        assert turns(group).tolist() == [2, 2, 2]
        assert all(outcome in (Outcome.CORRECT, Outcome.WRONG) for outcome in group.outcomes)
        for first, turn, between, last in shown(model, group):
            asked = f"<|im_start|>user\nWhat is {number + 2} plus 3?<|im_end|>\n<|im_start|>assistant\n"
            assert first == (False, f"system\n1 tools<|im_end|>\n{asked}") and turn[0] and last[0]
            if "tool" in between[1]:
                called += 1
                assert re.fullmatch(r"\n<\|im_start\|>tool\n\d+<\|im_end\|>\n<\|im_start\|>assistant\n", between[1])
            else:
                assert between[1] == "\n<|im_start|>user\nTry again.<|im_end|>\n<|im_start|>assistant\n"
    assert called >= 3
    assert len({score for group in filled.groups for score in group.scores}) > 1


def test_log_probs_are_the_learners(rollout: Rollout, policy: Policy, model: Prompter) -> None:
    """Over every sampled token of both turns; and the step can be trained on."""
    filled = fill(rollout, policy, order(model))
    config = Config(rollout=RolloutConfig(max_new_tokens=CAP), verifier=VerifierConfig(kind="environment"))
    samples = [sample for group in filled.groups for sample in all_samples(group, np.zeros(3))]
    learner = forward_pass_of(policy, config).recomputed([whole(sample) for sample in samples], 1.0)
    actor = np.concatenate([sample.actor_logprobs[sample.trained] for sample in samples])
    np.testing.assert_allclose(actor, learner, atol=2e-5)
    batch = batch_of([replace(group, rewards={}) for group in filled.groups], policy, config)
    assert batch.response_tokens == sum(sample.sample.length for sample in batch.samples) > 0


def test_the_same_order_gives_the_same_bits(rollout: Rollout, policy: Policy, model: Prompter) -> None:
    first, again = (fill(rollout, policy, order(model)) for _ in range(2))
    assert all(same_bits(one, other) for one, other in zip(first.groups, again.groups, strict=True))


@pytest.mark.parametrize("fault", ["rewrite 1", "tools 1"])
def test_history_that_is_rewritten_is_refused_and_the_agent_may_go_on(
    rollout: Rollout, policy: Policy, model: Prompter, fault: str
) -> None:
    """The agent's assertions are about the refusal. Not a token differs."""
    plain, filled = fill(rollout, policy, order(model)), fill(rollout, policy, order(model, {}, {"fault": fault}, {}))
    assert all(same_bits(one, other) for one, other in zip(plain.groups, filled.groups, strict=True))


@pytest.mark.parametrize("fault", ["again 1", "raise 0", "raise 1", "long 0"])
def test_an_agent_that_fails_ends_its_rollouts_alone(
    rollout: Rollout, policy: Policy, model: Prompter, fault: str
) -> None:
    plain, filled = fill(rollout, policy, order(model)), fill(rollout, policy, order(model, {}, {"fault": fault}, {}))
    assert unharmed(plain.groups[0], filled.groups[0]) and unharmed(plain.groups[2], filled.groups[2])
    bad = filled.groups[1]
    assert set(bad.outcomes) == {Outcome.ABSTAIN if fault == "long 0" else Outcome.ERROR}
    assert set(bad.scores) == {0.0} and turns(bad).tolist() == [1] * 3


@pytest.mark.parametrize("given", [{"turns": "4"}, {"fault": "long 1"}])
def test_a_limit_cuts_the_rollout_short(
    rollout: Rollout, policy: Policy, model: Prompter, given: dict[str, str]
) -> None:
    """The agent raises what the endpoint told it."""
    group = fill(rollout, policy, order(model, given)).groups[0]
    assert set(group.outcomes) == {Outcome.TRUNCATED} and set(group.scores) == {0.0}
    assert set(group.finishes) == {Finish.LENGTH}
    assert turns(group).tolist() == [3 if given.get("turns") else 1] * 3


@pytest.mark.parametrize("cap", [2, 60, 80, 100])
def test_no_completion_is_longer_than_the_cap(rollout: Rollout, policy: Policy, model: Prompter, cap: int) -> None:
    filled = fill(rollout, policy, order(model, cap=cap))
    assert max(length for group in filled.groups for length in group.lengths) <= cap
    known = {Outcome.ABSTAIN} if cap == 2 else {Outcome.TRUNCATED, Outcome.CORRECT, Outcome.WRONG, Outcome.ABSTAIN}
    assert {outcome for group in filled.groups for outcome in group.outcomes} <= known


def test_an_agent_that_asks_nothing_is_an_error(
    engine: HFEngine, policy: Policy, model: Prompter, source: Path
) -> None:
    with opened(engine, model, source, "silent") as rollout:
        group = fill(rollout, policy, order(model, {})).groups[0]
    assert set(group.outcomes) == {Outcome.ERROR} and turns(group).tolist() == [1, 1, 1]


def test_a_function_judges_all_turns(engine: HFEngine, policy: Policy, model: Prompter, source: Path) -> None:
    with opened(engine, model, source, kind="callable") as rollout:
        group = fill(rollout, policy, order(model, {})).groups[0]
    lengths = []
    for ids, mask in zip(
        by_completion(group, group.completion_ids), by_completion(group, trained_tokens(group)), strict=True
    ):
        lengths.append(float(len(model.text(ids[mask.argmax() :].tolist()))))
    assert list(group.scores) == lengths and Outcome.ERROR not in group.outcomes


def test_a_template_without_a_common_beginning_is_refused(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "model")
    template = tmp_path / "model" / "chat_template.jinja"
    template.write_text(template.read_text().replace("'<|im_start|>' ~ message.role", "message.role"))
    with pytest.raises(ModelError, match="does not begin every conversation with the same special token"):
        load_prompter(tmp_path / "model", EnvironmentConfig(kind="agent"))
