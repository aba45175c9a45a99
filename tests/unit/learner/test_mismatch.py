"""The gate in front of the first update: what it lets through, what it refuses, and what it says is to blame."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from learner.objective.batch import Sample, StepBatch
from learner.update.mismatch import (
    BELIEVED,
    BF16,
    FP32,
    NF4_PLUGIN,
    TIMES_MEAN,
    TIMES_P99,
    Gap,
    Gate,
    Limits,
    Mismatch,
    Suspects,
    Tokens,
    gap_of,
    likely_cause,
    refusal,
)
from learner.update.update import at_scale, roundings
from shared.base.cache import cached_base
from shared.base.load import load_policy
from shared.config.model import LoraConfig, ModelConfig
from shared.config.tree import Config, LossConfig, RolloutConfig
from shared.model.adapter_file import adapter_bytes
from shared.model.policy import Policy
from tests.support.fakes import shake, tiny_policy
from tests.support.steps import forward_pass_of, step_batch, update_of

pytestmark = pytest.mark.usefixtures("one_thread")

CONFIG = Config(rollout=RolloutConfig(temperature=0.8), loss=LossConfig(max_mismatch=0.02))


def samples(count: int = 6) -> list[Sample]:
    rng = np.random.default_rng(0)
    return [
        Sample(
            name=f"g{index // 2}[{index % 2}]",
            prompt_ids=np.random.default_rng(index // 2).integers(0, 97, 5).astype(np.int32),
            completion_ids=rng.integers(0, 97, 8 + index).astype(np.int32),
            trained=np.ones(8 + index, bool),
            actor_logprobs=np.zeros(8 + index, np.float32),
            entropies=None,
            advantage=1.0 - 2 * (index % 2),
        )
        for index in range(count)
    ]


def samples_of(policy: Policy, temperature: float, adapter: bool = True) -> list[Sample]:
    """The samples with the log-probs of an actor that computes like this."""
    batch = step_batch(samples(), 0, CONFIG)
    forward_pass = forward_pass_of(policy, CONFIG)
    flat = (
        forward_pass.recomputed(batch.samples, temperature)
        if adapter
        else forward_pass.recomputed_by_base(batch.samples)
    )
    cuts = np.cumsum([len(s.completion_ids) for s in samples()])[:-1]
    return [replace(s, actor_logprobs=found) for s, found in zip(samples(), np.split(flat, cuts), strict=True)]


def batch_of(found: list[Sample], config: Config = CONFIG) -> StepBatch:
    return step_batch(found, 0, config, on_policy=True)


def changed(found: list[Sample], change: Callable[[np.ndarray], np.ndarray]) -> list[Sample]:
    return [replace(s, actor_logprobs=change(s.actor_logprobs).astype(np.float32)) for s in found]


@pytest.fixture
def policy(checkpoint: Path) -> Policy:
    return tiny_policy(checkpoint)


def test_four_figures() -> None:
    assert gap_of(np.arange(101.0)) == Gap(mean=50.0, p95=95.0, p99=99.0, largest=100.0)


def test_rounding_is_let_through_and_learned_from(policy: Policy) -> None:
    found = changed(samples_of(policy, 0.8), lambda values: values + 0.01 * (-1.0) ** np.arange(len(values)))
    before = adapter_bytes(policy.adapter)
    stats = update_of(policy, CONFIG).apply(0, batch_of(found))
    assert stats is not None and np.quantile(stats.mismatch, 0.99) == pytest.approx(0.01, rel=0.01)
    assert adapter_bytes(policy.adapter) != before


def refused(policy: Policy, found: list[Sample], config: Config = CONFIG) -> str:
    """The sentence; nothing may have been learned."""
    before = adapter_bytes(policy.adapter)
    with pytest.raises(Mismatch) as caught:
        update_of(policy, config).apply(3, batch_of(found, config))
    assert adapter_bytes(policy.adapter) == before
    sentence = str(caught.value)
    assert sentence.startswith("Step 4: actor and learner differ in log-prob (mean ")
    assert "nothing was learned from them" in sentence
    assert "mean " in sentence and "p95 " in sentence and "maximum " in sentence and "allowed: 0.02" in sentence
    return sentence.partition("Likely cause: ")[2]


def test_a_temperature_that_was_not_applied_is_named(policy: Policy) -> None:
    assert refused(policy, samples_of(policy, 1.0)).startswith(
        "the actor samples at temperature 1 where 0.8 was ordered"
    )


def test_the_checkpoints_own_temperature_is_named(policy: Policy) -> None:
    assert "at temperature 0.6 where 0.8" in refused(policy, samples_of(policy, 0.6))


def test_an_adapter_that_never_went_in_is_named(policy: Policy) -> None:
    cause = refused(policy, samples_of(policy, 0.8, adapter=False))
    assert cause.startswith("a stale adapter: the actor's log-probs are those of the base")


def test_another_adapter_is_named(policy: Policy, checkpoint: Path) -> None:
    other = tiny_policy(checkpoint)
    shake(other, 7)
    assert refused(policy, samples_of(other, 0.8)).startswith("a stale adapter, half of one, or a wrong scale")


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_a_wrong_scale_is_named(policy: Policy, checkpoint: Path, factor: float) -> None:
    other = tiny_policy(checkpoint)
    for layer in other.adapter.layers.values():
        layer.scale *= factor
    what = "a stale adapter, half of one, or a wrong scale" if factor < 1 else "a wrong scale"
    assert refused(policy, samples_of(other, 0.8)).startswith(f"{what}: the actor applies its adapter {factor:g} times")


def test_half_an_adapter_is_named_with_its_share(policy: Policy, checkpoint: Path) -> None:
    other = tiny_policy(checkpoint)
    for name in sorted(other.adapter.layers)[::2]:
        other.adapter.layers[name].scale = 0.0
    cause = refused(policy, samples_of(other, 0.8))
    assert cause.startswith("a stale adapter, half of one, or a wrong scale: the actor's log-probs show about ")


def test_truncation_is_named(policy: Policy) -> None:
    """A support cut to its likely part: all log-probs rise by what was cut off, here 3 to 40 percent."""
    kept = np.random.default_rng(1)
    found = changed(samples_of(policy, 0.8), lambda values: values - np.log(kept.uniform(0.6, 0.97, len(values))))
    assert refused(policy, found).startswith("truncation: ")


def test_a_compute_type_is_named(policy: Policy) -> None:
    noise = np.random.default_rng(1)
    found = changed(samples_of(policy, 0.8), lambda values: values + noise.normal(0, 0.05, len(values)))
    assert refused(policy, found).startswith("another compute type, another quantisation")


def test_samples_of_an_older_version_are_not_judged(policy: Policy) -> None:
    assert update_of(policy, CONFIG).apply(3, step_batch(samples_of(policy, 1.0), 0, CONFIG)) is not None


def test_only_the_tokens_that_are_learned_from_are_judged(policy: Policy) -> None:
    config = replace_loss(CONFIG, entropy_fraction=0.25)
    found = forward_pass_of(policy, config).with_entropies(samples_of(policy, 0.8))
    spoiled = [
        replace(s, actor_logprobs=np.where(mask, s.actor_logprobs, -9.0).astype(np.float32))
        for s, mask in zip(found, [sample.selected for sample in batch_of(found, config).samples], strict=True)
    ]
    assert update_of(policy, config).apply(0, batch_of(spoiled, config)) is not None


def replace_loss(config: Config, **changes: float) -> Config:
    from msgspec.structs import replace as change

    return change(config, loss=change(config.loss, **changes))


def test_a_gap_that_is_no_number_is_refused_where_the_weight_hides_it(policy: Policy) -> None:
    config = replace_loss(CONFIG, importance_cap=0.0)
    found = changed(samples_of(policy, 0.8), lambda values: np.full_like(values, np.nan))
    refused(policy, found, config)


def test_with_several_passes_the_first_one_is_judged(policy: Policy) -> None:
    from msgspec.structs import replace as change

    config = change(CONFIG, loss=change(CONFIG.loss, passes=2))
    refused(policy, samples_of(policy, 1.0), config)


def test_what_is_particular_is_named_before_what_is_general() -> None:
    """A temperature makes differences of either sign; it must not be taken for rounding."""
    actor = np.array([-1.0, -2.0, -3.0])
    tokens = Tokens(actor=actor, learner=actor + np.array([0.03, -0.03, 0.03]), temperature=1.0)
    exact = {0.9: actor}
    suspects = Suspects(at_temperature=lambda t: exact.get(t, actor + 9.0), at_scale=lambda factor: actor + 9.0)
    assert "temperature 0.9" in likely_cause(tokens, Limits(mean=0.001, p99=0.001), suspects)


def gap(mean: float, p99: float) -> Gap:
    return Gap(mean=mean, p95=p99, p99=p99, largest=p99)


class Measured:
    """Rounding that counts how often it was asked for."""

    def __init__(self, *found: Gap) -> None:
        self.found = list(found)
        self.asked = 0

    def __iter__(self) -> "Measured":
        return self

    def __next__(self) -> Gap:
        if self.asked == len(self.found):
            raise StopIteration
        self.asked += 1
        return self.found[self.asked - 1]


def test_below_the_floor_nothing_is_measured() -> None:
    measured = Measured()
    assert Gate(0.0, FP32).admits(gap(FP32.mean, FP32.p99), measured)
    assert measured.asked == 0


@pytest.mark.parametrize(
    ("found", "admitted"), [(gap(0.06, 0.3), True), (gap(0.07, 0.3), False), (gap(0.06, 0.5), False)]
)
def test_above_the_floor_the_learners_own_rounding_decides(found: Gap, admitted: bool) -> None:
    measured = Measured(gap(0.025, 0.15))
    assert Gate(0.0, BF16).admits(found, measured) is admitted
    assert measured.asked == 1


def test_the_largest_rounding_is_remembered() -> None:
    measured, gate = Measured(gap(0.02, 0.1), gap(0.01, 0.05)), Gate(0.0, BF16)
    assert gate.admits(gap(0.04, 0.2), measured) and gate.admits(gap(0.045, 0.25), measured)
    assert measured.asked == 1
    assert not gate.admits(gap(0.06, 0.25), measured)
    assert measured.asked == 2 and gate.limits.mean == 0.05 and gate.limits.p99 == pytest.approx(0.3)


def test_before_a_run_is_stopped_more_tokens_are_looked_at() -> None:
    """Figures of a model of 135 million parameters that was sure of nearly all tokens: an honest run."""
    found, few, many = gap(0.0187, 0.573), gap(0.0005, 0.01), gap(0.0186, 0.465)
    measured, gate = Measured(few, many), Gate(0.0, BF16)
    assert gate.admits(found, measured) and measured.asked == 2
    assert not gate.admits(gap(0.06, 0.573), Measured(few, many)), "a mean of three times the rounding"
    assert not gate.blurred


@pytest.mark.parametrize("limits", [BF16, Limits(mean=0.25, p99=3.0)], ids=["floor", "raised"])
def test_causes_are_named_under_raised_limits_too(limits: Limits) -> None:
    rng = np.random.default_rng(0)
    base, learner = -rng.exponential(3.0, 400), -rng.exponential(1.0, 400)
    noise = rng.normal(0.0, 0.02, 400)
    suspects = Suspects(
        at_temperature=lambda t: learner * t - 1.0, at_scale=lambda factor: base + factor * (learner - base)
    )
    for actor, said in (
        (base + noise, "those of the base without one"),
        (base + 0.7 * (learner - base) + noise, "show about 70% of the adapter's effect"),
        (learner + 0.4 + noise, "truncation"),
    ):
        tokens = Tokens(actor=actor, learner=learner, temperature=1.0)
        assert said in likely_cause(tokens, limits, suspects), said
    exact = Tokens(actor=base + noise, learner=learner, temperature=1.0)
    assert "those of the base" in likely_cause(exact, limits, suspects, blurred=True), "what explains d comes first"


def test_fp32_and_the_plugin_have_fixed_limits() -> None:
    for floor in (FP32, NF4_PLUGIN):
        measured = Measured(gap(0.5, 1.2))
        assert not Gate(0.0, floor).admits(gap(1.0, 3.0), measured)
        assert measured.asked == 0


def test_a_learner_that_disagrees_with_itself_does_not_raise_the_limits_for_ever() -> None:
    gate = Gate(0.0, BF16)
    assert not gate.admits(gap(1.0, 4.0), Measured(gap(0.5, 1.2)))
    tokens, suspects = (
        Tokens(actor=np.ones(3), learner=np.zeros(3), temperature=1.0),
        Suspects(at_temperature=lambda t: np.zeros(3), at_scale=lambda factor: np.zeros(3)),
    )
    assert "compute.dtype = fp32" in str(refusal(4, tokens, gate, suspects))
    assert gate.limits == Limits(mean=TIMES_MEAN * BELIEVED.mean, p99=TIMES_P99 * BELIEVED.p99)


def test_raised_limits_come_back_with_a_checkpoint() -> None:
    first, second = Gate(0.0, BF16), Gate(0.0, BF16)
    assert first.admits(gap(0.04, 0.2), Measured(gap(0.02, 0.1)))
    second.load_state_dict(first.state_dict())
    assert second.limits == first.limits != BF16
    configured = Gate(0.2, BF16)
    configured.load_state_dict(configured.state_dict())
    assert configured.limits.p99 == 0.2


def test_a_copy_measures_too_once_the_limits_have_risen() -> None:
    gate = Gate(0.0, BF16)
    assert gate.admits(gap(0.04, 0.2), Measured(gap(0.02, 0.1)))
    copy, measured = gate.copy(), Measured(gap(0.03, 0.2))
    assert copy.admits(gap(0.07, 0.5), measured) and measured.asked == 1
    assert gate.limits.mean == 0.05, "those of the copy rise alone"
    for fixed in (Gate(0.0, FP32), Gate(0.2, BF16)):
        assert not fixed.copy().admits(gap(0.07, 0.5), measured) and measured.asked == 1


def test_a_configured_limit_is_of_the_percentile_and_nothing_is_measured() -> None:
    measured, gate = Measured(), Gate(0.2, BF16)
    assert gate.admits(gap(0.19, 0.2), measured) and not gate.admits(gap(0.0, 0.21), measured)
    assert measured.asked == 0


def test_a_gap_or_a_rounding_that_is_no_number_admits_nothing() -> None:
    nan = gap(float("nan"), float("nan"))
    assert not Gate(0.0, BF16).admits(nan, Measured(gap(9.0, 9.0)))
    assert not Gate(0.0, BF16).admits(gap(0.006, 0.01), Measured(nan))
    assert not Gate(0.2, BF16).admits(nan, Measured())


@pytest.mark.parametrize(("dtype", "least", "most"), [(torch.float32, 0.0, 1e-5), (torch.bfloat16, 1e-4, 0.06)])
def test_the_learner_differs_from_itself_by_the_rounding_of_its_type(
    checkpoint: Path, dtype: torch.dtype, least: float, most: float
) -> None:
    model, lora = ModelConfig(path=str(checkpoint), cache_dir=str(checkpoint.parent / "mismatch")), LoraConfig(rank=4)
    policy = load_policy(cached_base(model), model, lora, torch.device("cpu"), dtype)
    shake(policy, 3)
    (found,) = roundings(forward_pass_of(policy, CONFIG), step_batch(samples(), 0, CONFIG).samples)
    assert least <= found.mean <= most


def test_samples_without_a_token_in_the_update_have_no_rounding(policy: Policy) -> None:
    whole = step_batch(samples(16), 0, CONFIG).samples
    mixed = [
        sample if place % 2 else replace(sample, selected=np.zeros_like(sample.selected))
        for place, sample in enumerate(whole)
    ]
    found, alone = (next(roundings(forward_pass_of(policy, CONFIG), some)) for some in (mixed, whole[1::2]))
    assert found == alone


def test_the_scale_is_put_back(policy: Policy) -> None:
    before = [layer.scale for layer in policy.adapter.layers.values()]
    batch, forward_pass = step_batch(samples(), 0, CONFIG), forward_pass_of(policy, CONFIG)
    base = at_scale(forward_pass, batch.samples, 0.0)
    np.testing.assert_allclose(base, at_scale(forward_pass, batch.samples, 1e-9), atol=1e-5)
    assert [layer.scale for layer in policy.adapter.layers.values()] == before


def test_of_many_samples_a_few_are_looked_at_first(policy: Policy) -> None:
    forward_pass = forward_pass_of(policy, CONFIG)
    assert len(list(roundings(forward_pass, step_batch(samples(8), 0, CONFIG).samples))) == 1
    assert len(list(roundings(forward_pass, step_batch(samples(9), 0, CONFIG).samples))) == 2
