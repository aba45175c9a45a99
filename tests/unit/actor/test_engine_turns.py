"""Turns continue from kept keys and values, with the numbers of a pass over the whole conversation."""

from collections.abc import Sequence

import numpy as np
import pytest
from msgspec.structs import replace

from actor.engines.engine import Completion
from actor.engines.fixed_decoding import FixedLoop, Grain
from actor.engines.hf_engine import HFEngine
from actor.engines.token_step.layers import Layers
from protocol.messages import Finish, GroupOrder, Sampling
from shared.config.processes import ActorConfig
from shared.model.policy import Policy
from shared.seeding import derive
from tests.support.architectures import architecture_model
from tests.support.fakes import shake, tiny_policy, tiny_prompter, unheard
from tests.unit.actor.test_hf_engine import ENDS, assert_same_bits, flat, orders, teacher_forced

pytestmark = pytest.mark.usefixtures("one_thread")

SAMPLING = Sampling(temperature=0.9, max_new_tokens=16)
FAMILIES = ["Llama", "Qwen2", "Qwen2 windowed", "Qwen3"]
Conversation = tuple[GroupOrder, Completion]


@pytest.fixture(scope="module", params=FAMILIES)
def policy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Policy:
    policy = tiny_policy(architecture_model(tmp_path_factory.mktemp("model"), request.param))
    shake(policy, 3)
    return policy


def engine_of(policy: Policy, kind: str, width: int) -> HFEngine:
    engine = HFEngine(policy, tiny_prompter(*ENDS), ActorConfig(max_sequences=width, fold="never"))
    if kind == "fixed":
        assert isinstance(engine.layers, Layers)
        engine.fixed = FixedLoop(policy, engine.layers, engine.end_ids, Grain())
    return engine


def next_turn(group: GroupOrder, index: int, completion: Completion, turn: int) -> GroupOrder:
    """As an environment would continue this completion."""
    answer = np.random.default_rng([turn, index, len(completion.ids)]).integers(6, 90, 1 + (index + turn) % 4)
    ids = np.concatenate([group.prompt_ids, completion.ids, answer.astype(np.int32)])
    return replace(group, prompt_ids=ids, seeds=(group.seeds[index],))


def conversations(engine: HFEngine, count: int = 3) -> list[list[Conversation]]:
    """Turns of all completions that end themselves; the others stop."""
    groups, found = orders(), list[list[Conversation]]()
    for turn in range(count):
        taken = engine.take_turn(groups, SAMPLING, unheard)
        pairs = list(zip(groups, taken, strict=True))
        found.append([(group, one) for group, several in pairs for one in several])
        groups = tuple(
            next_turn(group, index, one, turn)
            for group, several in pairs
            for index, one in enumerate(several)
            if one.finish is Finish.STOP
        )
    engine.sleep()
    return found


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("kind", "width"), [("dynamic", 0), ("dynamic", 5), ("fixed", 0), ("fixed", 5)])
def test_every_turn_has_the_numbers_of_the_whole_conversation(policy: Policy, kind: str, width: int) -> None:
    found = conversations(engine_of(policy, kind, width))
    assert len(found[0]) == 12 and len(found[-1]) > 2
    for group, completion in (pair for turn in found for pair in turn):
        logprobs, entropies = teacher_forced(policy, group.prompt_ids, completion.ids, SAMPLING.temperature)
        np.testing.assert_allclose(completion.logprobs, logprobs, rtol=1e-5, atol=1e-5)
        assert completion.entropies is not None
        np.testing.assert_allclose(completion.entropies, entropies, rtol=1e-5, atol=1e-5)


def test_the_same_turns_give_the_same_bits_and_both_loops_the_same_tokens(policy: Policy) -> None:
    engine = engine_of(policy, "dynamic", 0)
    first, again = conversations(engine), conversations(engine)
    other = conversations(engine_of(policy, "fixed", 4))
    assert_same_bits(completions(again), completions(first))
    assert [one.ids.tolist() for one in flat(completions(other))] == [
        one.ids.tolist() for one in flat(completions(first))
    ]


def completions(turns: Sequence[Sequence[Conversation]]) -> list[list[Completion]]:
    return [[completion for _, completion in turn] for turn in turns]


def test_kept_keys_are_used_and_forgotten_with_the_order(policy: Policy) -> None:
    """Only the new tokens of a turn are run: another beginning, in the same length, changes nothing."""
    engine = engine_of(policy, "dynamic", 0)
    [first] = engine.take_turn(orders(1), SAMPLING, unheard)
    index = next(place for place, one in enumerate(first) if one.finish is Finish.STOP)
    second = next_turn(orders(1)[0], index, first[index], 0)
    kept = dict(engine.turns.kept) if engine.turns else {}
    assert kept
    [[told]] = engine.take_turn((second,), SAMPLING, unheard)
    engine.sleep()
    assert engine.turns is None
    assert engine.take_turn(orders(1), SAMPLING, unheard) and engine.turns
    swapped = second.prompt_ids.copy()
    swapped[: len(orders(1)[0].prompt_ids)] = 7
    [[same]] = engine.take_turn((replace(second, prompt_ids=swapped),), SAMPLING, unheard)
    assert same.logprobs.tobytes() == told.logprobs.tobytes()


def test_a_later_turn_draws_what_the_first_one_has_not(policy: Policy) -> None:
    """The stream of a completion goes on."""
    engine = engine_of(policy, "dynamic", 0)
    group = GroupOrder(group_id="g", prompt_ids=np.array([9, 8, 7], np.int32), columns={}, seeds=(derive(0, "one"),))
    [[first]] = engine.take_turn((group,), SAMPLING, unheard)
    assert engine.turns and engine.turns.drawn_before(group, 0) == len(first.ids)
