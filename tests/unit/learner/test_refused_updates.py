"""An update that must not be applied: found before the optimizer, blamed on the right sample, retried if transient."""

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs
from torch import nn

from learner.objective.batch import StepBatch
from learner.quarantine.guard import Guard, next_steps
from learner.quarantine.quarantine import keep_nowhere
from learner.quarantine.reproduce import first_bad
from learner.update.forward_pass import UNCHANGED
from learner.update.gradient_check import FEWEST, Finding, NumericalFault, suspect
from learner.update.update import Update, WeightsNotFinite
from shared.config.tree import BatchConfig, Config, GuardConfig, LossConfig, OptimizerConfig, RolloutConfig
from shared.errors import TrainingStopped
from shared.model.adapter_file import adapter_bytes
from tests.support.fakes import OverflowOnTheWayBack, tiny_group, tiny_policy
from tests.support.steps import idle_samples, later_pass, never_stepped, step_batch, teaching_samples, update_of

pytestmark = pytest.mark.usefixtures("one_thread")

NAMES = [f"{group}[{index}]" for group in "abc" for index in range(3)]
GUILTY = "b[1]"


def config_for(budget: int = 45, passes: int = 1, fraction: float = 1.0, lr: float = 1e-3, **guard: Any) -> Config:
    return Config(
        loss=LossConfig(passes=passes, entropy_fraction=fraction),
        rollout=RolloutConfig(max_new_tokens=14),
        batch=BatchConfig(token_budget=budget, head_rows=5),
        optimizer=OptimizerConfig(lr=lr, max_grad_norm=1e9),
        guard=GuardConfig(**guard),
    )


def replaced_loss(config: Config, **loss: Any) -> Config:
    return structs.replace(config, loss=structs.replace(config.loss, **loss))


def batch_of(config: Config, **changes: Any) -> StepBatch:
    """Nine samples; the guilty one is changed."""
    groups = [tiny_group([1.0, 0.0, 0.0], [3, 12, 7], group_id=name, seed=seed) for seed, name in enumerate("abc")]
    samples = teaching_samples(groups, config)
    assert [sample.name for sample in samples] == NAMES
    return step_batch([replace(s, **changes) if s.name == GUILTY else s for s in samples], 0, config)


def spoiled_logprobs(config: Config) -> np.ndarray:
    """One value of the guilty sample's that is no number."""
    logprobs = batch_of(config).samples[4].sample.actor_logprobs.copy()
    logprobs[1] = np.nan
    return logprobs


def faulty(update: Update, batch: StepBatch, step: int = 0) -> NumericalFault:
    """The fault, after nothing was changed."""
    before = adapter_bytes(update.policy.adapter)
    with pytest.raises(NumericalFault) as caught:
        update.apply(step, batch)
    assert adapter_bytes(update.policy.adapter) == before
    assert never_stepped(update.optimizer) and not update.norms.recent
    assert all(value.grad is None for value in update.optimizer.parameters.values())
    return caught.value


@pytest.mark.parametrize("fraction", [0.2, 1.0])
@pytest.mark.parametrize("budget", [1, 45, 10_000])
def test_a_log_prob_that_is_no_number_is_blamed_on_its_sample(checkpoint: Path, budget: int, fraction: float) -> None:
    """However the step is cut into micro-batches, and though a mask may leave other samples without a token."""
    config = config_for(budget, fraction=fraction)
    entropies = np.full(12, 9.0, np.float32)
    batch = batch_of(config, actor_logprobs=spoiled_logprobs(config), entropies=entropies)
    fault = faulty(update_of(tiny_policy(checkpoint), config), batch, step=6)
    assert fault.refusal.kind == "not finite" and fault.suspect.sample == GUILTY
    assert [finding.sample for finding in fault.findings] == NAMES
    assert [finding.sample for finding in fault.findings if not finding.finite] == [GUILTY]
    assert str(fault).startswith(
        "Step 7: loss nan and gradient norm nan are not both finite; the suspect is sample b[1]"
    )


def test_a_spike_is_blamed_on_the_largest(checkpoint: Path) -> None:
    config = config_for(grad_norm_limit=100.0)
    fault = faulty(update_of(tiny_policy(checkpoint), config), batch_of(config, advantage=1e5))
    assert fault.refusal.kind == "spike" and fault.suspect.sample == GUILTY
    others = [f.grad_norm for f in fault.findings if f.sample != GUILTY]
    assert fault.suspect.grad_norm > 100.0 > max(others) > 0.0


def test_a_spike_against_the_steps_before(checkpoint: Path) -> None:
    config = config_for(spike_factor=50.0)
    update = update_of(tiny_policy(checkpoint), config)
    for step in range(8):
        assert update.apply(step, batch_of(config))
    assert len(update.norms.recent) == 8
    with pytest.raises(NumericalFault, match=r"Step 9: .*guard\.spike_factor = 50 times the median of the last 8"):
        update.apply(8, batch_of(config, advantage=1e5))
    assert update.apply(8, batch_of(config)) and len(update.norms.recent) == 9


def test_the_samples_gradients_add_up_to_the_steps(checkpoint: Path) -> None:
    """Alone each sample has exactly its share: weights were settled over the step."""
    config = config_for(fraction=0.3)
    update, batch = update_of(tiny_policy(checkpoint), config), batch_of(config)
    whole = update.gradient(batch.samples, UNCHANGED, update.accumulate)
    found = {name: value.grad.clone() for name, value in update.optimizer.parameters.items() if value.grad is not None}
    total = {name: torch.zeros_like(grad) for name, grad in found.items()}
    for sample in batch.samples:
        update.gradient([sample], UNCHANGED, update.accumulate)
        for name, value in update.optimizer.parameters.items():
            assert value.grad is not None
            total[name] += value.grad
    for name, grad in found.items():
        assert (total[name] - grad).norm() <= 1e-5 * grad.norm()
    assert sum(f.loss for f in update.each_alone(batch.samples, UNCHANGED)) == pytest.approx(whole.loss, rel=1e-4)


def test_a_gradient_that_overflows_on_the_way_back_stops_before_the_step(checkpoint: Path) -> None:
    policy = tiny_policy(checkpoint)
    policy = replace(policy, backbone=OverflowOnTheWayBack(policy.backbone), layers=None)
    config = config_for()
    fault = faulty(update_of(policy, config), batch_of(config))
    assert np.isfinite(fault.suspect.loss) and not np.isfinite(fault.suspect.grad_norm)


class OnceBroken(nn.Module):
    """A decoder on a machine that errs once."""

    def __init__(self, backbone: nn.Module, call: int) -> None:
        super().__init__()
        self.backbone = backbone
        self.call = call

    def forward(self, **inputs: Any) -> Any:
        """The decoder's output, but for one call's."""
        output = self.backbone(**inputs)
        self.call -= 1
        if self.call == 0:
            output.last_hidden_state = output.last_hidden_state * torch.nan
        return output


@pytest.mark.parametrize("call", [1, 3])
def test_what_does_not_come_back_was_the_machines_and_costs_nothing(checkpoint: Path, call: int) -> None:
    """The decision must follow from the numbers, or a replay would not make it again."""
    config = config_for(budget=60)
    right, erring = (replace(tiny_policy(checkpoint), layers=None) for _ in range(2))
    update_of(right, config).apply(0, batch_of(config))
    broken = OnceBroken(erring.backbone, call)
    assert update_of(replace(erring, backbone=broken, layers=None), config).apply(0, batch_of(config))
    assert broken.call < 0 and adapter_bytes(erring.adapter) == adapter_bytes(right.adapter)


def test_a_rate_that_makes_weights_no_numbers_is_named(checkpoint: Path) -> None:
    config = config_for(lr=1e37)
    with pytest.raises(
        WeightsNotFinite, match=r"Step 3 turned a finite gradient .* not finite: optimizer\.lr = 1e\+37 is too large"
    ):
        update_of(tiny_policy(checkpoint), config).apply(2, batch_of(config))


def test_the_first_that_is_not_finite_is_suspected_before_the_largest() -> None:
    found = [Finding(sample=name, loss=loss, grad_norm=norm) for name, loss, norm in (("a", 1.0, 9.0), ("b", 1.0, 3.0))]
    assert suspect(found).sample == "a"
    broken = Finding(sample="c", loss=float("nan"), grad_norm=1.0)
    assert suspect([*found, broken, replace(broken, sample="d")]).sample == "c"


def test_the_first_bad_tensor_is_named(checkpoint: Path) -> None:
    config = config_for()
    policy = tiny_policy(checkpoint)
    update, guilty = update_of(policy, config), batch_of(config).samples[4]
    healthy = first_bad(update, guilty, UNCHANGED)
    assert healthy.where == "gradient" and healthy.name in update.optimizer.parameters
    hurt = replace(guilty, sample=replace(guilty.sample, actor_logprobs=spoiled_logprobs(config)))
    assert (first_bad(update, hurt, UNCHANGED).where, first_bad(update, hurt, UNCHANGED).name) == (
        "batch",
        "actor_logprobs",
    )
    back = update_of(replace(policy, backbone=OverflowOnTheWayBack(policy.backbone), layers=None), config)
    assert first_bad(back, guilty, UNCHANGED).where == "backward"
    # Large enough that this layer's output overflows, small enough to be a number itself.
    huge = policy.adapter.layers["model.layers.1.mlp.down_proj"]
    with torch.no_grad():
        huge.lora_B.fill_(1e38)
    found = first_bad(update, guilty, UNCHANGED)
    assert (found.where, found.name) == ("forward", "layers.1.mlp.down_proj")
    with torch.no_grad():
        huge.lora_A[0, 0] = torch.inf
    found = first_bad(update, guilty, UNCHANGED)
    assert (found.where, found.name) == ("adapter", "model.layers.1.mlp.down_proj.lora_A")
    assert all(value.grad is None for value in update.optimizer.parameters.values())


def test_steps_that_only_have_a_kl_do_not_make_the_next_one_that_teaches_a_spike(checkpoint: Path) -> None:
    """The gradient of a KL alone is thousands of times smaller than one with advantages."""
    config = replaced_loss(config_for(lr=1e-4), kl_beta=1e-4)
    update = update_of(tiny_policy(checkpoint), config)
    groups = [tiny_group([0.0, 0.0, 0.0], [3, 12, 7], group_id="none right", seed=5)]
    teaches, idles = batch_of(config), step_batch([], 1, config, idle_samples(groups, config))
    norms = [update.apply(step, teaches).grad_norm for step in range(2)]
    idle_norms = [update.apply(2 + step, idles).grad_norm for step in range(FEWEST)]
    assert min(norms) > config.guard.spike_factor * max(idle_norms) > 0
    assert list(update.norms.recent) == norms
    assert update.apply(2 + FEWEST, teaches).grad_norm > 0


def test_a_gradient_of_zero_is_none_of_the_norms_that_the_guard_compares(checkpoint: Path) -> None:
    """All tokens are so far from the policy before that clipping takes the gradient of each."""
    config = config_for()
    update, batch = update_of(tiny_policy(checkpoint), config), batch_of(config)
    old, signs = update.forward_pass.old(batch.used).by_sample, {s.sample.name: s.sample.advantage for s in batch.used}
    far = {name: logprobs - (2.0 if signs[name] > 0.0 else -2.0) for name, logprobs in old.items()}
    stats = later_pass(update, batch, far)
    assert stats.grad_norm == 0.0 and stats.loss != 0.0 and stats.clipped.all() and not update.norms.recent
    norm = later_pass(update, batch, {**old}).grad_norm
    assert list(update.norms.recent) == [norm] and norm > 0.0


def test_refused_updates_in_a_row_are_counted_from_the_last_that_was_applied(checkpoint: Path) -> None:
    config = config_for(on_fault="skip", skips_in_a_row=1)
    guard = Guard(update_of(tiny_policy(checkpoint), config), config.guard, b"{}", keep_nowhere)
    good, bad = batch_of(config), batch_of(config, advantage=float("nan"))
    applied = [guard.apply(step, [], one).stats is not None for step, one in enumerate([bad, good, bad])]
    assert applied == [False, True, False]
    with pytest.raises(TrainingStopped, match=r"one more in a row than guard\.skips_in_a_row = 1 allows"):
        guard.apply(3, [], bad)


@pytest.mark.parametrize("folder", ["runs/first", "my runs/it's one"])
def test_what_a_user_can_type_now_works_for_every_name_of_a_folder(folder: str) -> None:
    file = Path(folder) / "quarantine" / "step-000003.safetensors"
    commands = [shlex.split(command)[3:] for command in next_steps(file, 4).split("`")[1::2]]
    assert commands == [
        ["replay", "--batch", str(file)],
        ["resume", folder, "--on-fault", "skip"],
        ["resume", folder, "--resample-step", "4"],
    ]
