"""An engine that tells entropies and one that cannot lead to the same tokens: the learner's own pass selects them."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from actor.engines.hf_engine import HFEngine
from learner.objective.batch import Sample, selection
from protocol.messages import GroupOrder, Sampling
from shared.config.tree import Config, LossConfig, RolloutConfig
from shared.model.policy import Policy
from shared.seeding import sample_seeds
from tests.support.fakes import tiny_policy, tiny_prompter
from tests.support.steps import forward_pass_of, step_batch, update_of

pytestmark = pytest.mark.usefixtures("one_thread")

TEMPERATURE = 0.9


def silent(*told: object) -> None:
    """Progress that nobody watches."""


def sampled(policy: Policy) -> list[Sample]:
    """What the decode loop draws, with the entropies it knows."""
    rng = np.random.default_rng(0)
    orders = tuple(
        GroupOrder(
            group_id=f"g{index}",
            prompt_ids=rng.integers(6, 97, 4 + 3 * index).astype(np.int32),
            columns={},
            seeds=sample_seeds(0, "test", 0, index, 4),
        )
        for index in range(3)
    )
    completions = HFEngine(policy, tiny_prompter(*range(6))).generate(
        orders, Sampling(temperature=TEMPERATURE, max_new_tokens=20), silent
    )
    return [
        Sample(
            name=f"{order.group_id}[{index}]",
            prompt_ids=order.prompt_ids,
            completion_ids=completion.ids,
            trained=np.ones(len(completion.ids), bool),
            actor_logprobs=completion.logprobs,
            entropies=completion.entropies,
            advantage=1.0,
        )
        for order, drawn in zip(orders, completions, strict=True)
        for index, completion in enumerate(drawn)
    ]


@pytest.mark.parametrize("fraction", [0.05, 0.2, 0.5, 0.9])
def test_both_sources_select_the_same_tokens_of_one_batch(checkpoint: Path, fraction: float) -> None:
    policy = tiny_policy(checkpoint)
    config = Config(rollout=RolloutConfig(temperature=TEMPERATURE), loss=LossConfig(entropy_fraction=fraction))
    forward_pass = forward_pass_of(policy, config)
    told = sampled(policy)
    found = forward_pass.with_entropies([replace(sample, entropies=None) for sample in told])
    for ours, theirs in zip(found, told, strict=True):
        assert ours.entropies is not None and theirs.entropies is not None
        np.testing.assert_allclose(ours.entropies, theirs.entropies, atol=1e-4)
    by_learner, by_engine = selection(found, fraction), selection(told, fraction)
    assert [rows.tolist() for rows in by_learner] == [rows.tolist() for rows in by_engine]
    assert 0 < sum(rows.sum() for rows in by_engine) < sum(len(rows) for rows in by_engine)


def test_an_update_tells_the_entropies_that_no_engine_told(checkpoint: Path) -> None:
    policy = tiny_policy(checkpoint)
    config = Config(rollout=RolloutConfig(temperature=TEMPERATURE), loss=LossConfig(entropy_fraction=1.0))
    told = sampled(policy)
    known = [sample.entropies for sample in told if sample.entropies is not None]
    blind = [replace(sample, entropies=None) for sample in told]
    stats = update_of(policy, config).apply(0, step_batch(blind, 0, config))
    np.testing.assert_allclose(np.sort(stats.entropies), np.sort(np.concatenate(known)), atol=1e-4)
