"""Conversations of several turns in vLLM: the learner's log-probs, the same bits again, and earlier turns not computed
again."""

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace

from actor.engines.engine import Completion
from actor.engines.vllm_engine import VLLMEngine
from actor.engines.vllm_internals import DrawOptions
from actor.environments.agents import Agents
from actor.environments.pool import EnvironmentPool
from protocol.messages import GroupOrder, Order, Outcome, Sampling
from shared.config.environment import EnvironmentConfig
from shared.model.canary import sequence_logprobs
from shared.model.prompt import load_prompter
from shared.seeding import derive
from tests.vllm.bench import Bench
from tests.vllm.test_sampling import bits, forced, silent

CAP = Sampling(temperature=1.0, max_new_tokens=24)
BETWEEN = [42, 71, 319, 81, 2, 201, 1, 286, 201]
"""What somebody says between two turns."""

AGENT = """
import json, urllib.request

def talk(base_url, api_key, question, **columns):
    messages = [{"role": "user", "content": question}]
    for _ in range(2):
        data = json.dumps({"messages": messages}).encode()
        request = urllib.request.Request(base_url + "/chat/completions", data, {"Authorization": f"Bearer {api_key}"})
        with urllib.request.urlopen(request) as reply:
            messages.append(json.loads(reply.read())["choices"][0]["message"])
        messages.append({"role": "user", "content": "And one more."})
    return 1.0
"""


class Watched:
    """vLLM; the seed of each request, and how many of its tokens were there already."""

    def __init__(self, vllm: Any) -> None:
        self.vllm = vllm
        self.cached: list[int] = []
        self.seeds: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.vllm, name)

    def submit(self, request: str, prompt_ids: list[int], draw: DrawOptions) -> None:
        self.seeds.append(draw.seed)
        self.vllm.submit(request, prompt_ids, draw)

    def step(self) -> Any:
        found = self.vllm.step()
        self.cached += [one.cached_tokens for one in found]
        return found


def watched(bench: Bench) -> tuple[VLLMEngine, Watched]:
    plain = bench.engine
    vllm: Any = Watched(plain.vllm)
    identity = plain.identity
    engine = VLLMEngine(vllm, plain.options, bench.prompter, plain.lora, plain.layout, identity.base_digest)
    return engine, vllm


def next_turn(groups: Sequence[GroupOrder], taken: Sequence[Sequence[Completion]]) -> tuple[GroupOrder, ...]:
    """One group for each conversation."""
    return tuple(
        replace(group, prompt_ids=np.array([*group.prompt_ids, *one.ids, *BETWEEN], np.int32), seeds=(seed,))
        for group, some in zip(groups, taken, strict=True)
        for seed, one in zip(group.seeds, some, strict=True)
    )


def test_two_turns_have_the_learners_log_probs_and_the_same_bits_again(bench: Bench) -> None:
    bench.engine.install(1, bench.adapter(1))
    groups, found = bench.groups(3, 3), list[Any]()
    for _ in range(2):
        first = bench.engine.take_turn(groups, CAP, silent)
        later = next_turn(groups, first)
        second = bench.engine.take_turn(later, CAP, silent)
        bench.engine.sleep()
        bench.engine.wake()
        found.append((bits(first), bits(second)))
        for order, (one,) in zip(later, second, strict=True):
            np.testing.assert_allclose(one.logprobs, forced(bench.policy, order, one), atol=1e-4)
        bench.engine.generate(bench.groups(5, 2, first_seed=7), CAP, silent)
    assert found[0] == found[1]
    assert len({ids for ids, _, _ in found[0][1]}) > 4, "each conversation draws for itself"


def test_no_turn_draws_with_the_seed_of_another(bench: Bench) -> None:
    engine, vllm = watched(bench)
    engine.install(1, bench.adapter(1))
    groups = bench.groups(2, 2)
    engine.take_turn(next_turn(groups, engine.take_turn(groups, CAP, silent)), CAP, silent)
    engine.sleep()
    engine.wake()
    assert len(vllm.seeds) == len(set(vllm.seeds)) == 8


def test_earlier_turns_are_found_again_until_the_engine_sleeps(bench: Bench) -> None:
    engine, vllm = watched(bench)
    engine.install(1, bench.adapter(1))
    groups = bench.groups(2, 2)
    first = engine.take_turn(groups, CAP, silent)
    later, before = next_turn(groups, first), len(vllm.cached)
    engine.take_turn(later, CAP, silent)
    blocks = [length // 16 for length in (len(order.prompt_ids) - len(BETWEEN) for order in later)]
    assert min(vllm.cached[before:]) >= 16 * (min(blocks) - 1) > 0
    engine.sleep()
    engine.wake()
    before = len(vllm.cached)
    engine.take_turn((later[0],), CAP, silent)
    assert vllm.cached[before:] == [0]
    engine.sleep()
    engine.wake()


def test_an_agent_is_played_and_its_log_probs_are_the_learners(bench: Bench, tmp_path: Path) -> None:
    bench.engine.install(1, bench.adapter(1))
    (tmp_path / "agent.py").write_text(AGENT)
    model = load_prompter(Path(bench.prompter.name), EnvironmentConfig(kind="agent"))
    config = EnvironmentConfig(kind="agent", function=f"{tmp_path}/agent.py:talk", step_limit_s=60.0)
    groups = tuple(
        GroupOrder(
            group_id=f"train/000000/{index:04d}",
            prompt_ids=np.array(model.begins, np.int32),
            columns={"question": f"Tom has {index + 2} apples and buys 3 more. How many now?"},
            seeds=tuple(derive(5, index, sample) for sample in range(2)),
        )
        for index in range(3)
    )
    sampling = Sampling(temperature=1.0, max_new_tokens=200)
    order = Order(
        order_id="train/000000/u0000", policy_version=1, sampling=sampling, groups=groups, votes=False, teacher=False
    )
    with closing(Agents(EnvironmentPool(config), model, config, scores=True)) as agents:
        episodes = agents.play(order, bench.engine, silent)
    bench.engine.sleep()
    bench.engine.wake()
    assert sum(episode.turns == 2 for episode in episodes) >= 3
    for episode in episodes:
        assert not episode.fault or episode.fault.outcome is not Outcome.TIMEOUT, episode.fault
        one = episode.completion()
        known = sequence_logprobs(bench.policy, np.concatenate([episode.order.prompt_ids, one.ids]))
        assert one.trained is not None
        sampled = one.trained.astype(bool)
        np.testing.assert_allclose(one.logprobs[sampled], known[sampled], atol=1e-4)
