"""A quarantined batch once more, alone: the same update on the CPU, and where its numbers first go wrong.

Everything comes from the file but the frozen base, which must be the one named there. A fault that a card's bf16 made
may not come back in fp32; that is said, not hidden.
"""

from collections.abc import Callable
from dataclasses import dataclass

from learner.anchor import Anchor
from learner.batch import StepBatch
from learner.batches import Batches
from learner.fault import Finding, NumericalFault
from learner.first_bad import BadTensor, first_bad
from learner.norms import Norms
from learner.optimizer import Optimizer
from learner.quarantine import KeptBatch
from learner.update import Update
from shared.config.tree import Config
from shared.errors import DamageError
from shared.model.adapter_file import install_adapter
from shared.model.base_cache import cached_base
from shared.model.policy import Policy, load_policy, pick_device
from shared.process.determinism import pin_torch


@dataclass(frozen=True, kw_only=True)
class Reproduction:
    """What the batch did this time."""

    batch: StepBatch
    """As it was built."""
    fault: NumericalFault | None
    """None if the update went through."""
    findings: tuple[Finding, ...]
    """Every sample alone."""
    grad_norm: float
    """Of the whole batch, where it went through; NaN where it did not."""
    bad: BadTensor | None
    """Where the suspect's numbers first go wrong; None if nothing of it is refused."""


def reproduce(kept: KeptBatch, config: Config, progress: Callable[[], None]) -> Reproduction:
    """Build what the update needs, apply it, look at what happened."""
    update = build_update(kept, load_base(kept, config), config, progress)
    batch = Batches(config, update).build(kept.answers)
    findings = tuple(update.each_alone(batch.scored, {}))
    try:
        stats = update.apply(kept.step, batch)
    except NumericalFault as fault:
        blamed = next(sample for sample in batch.scored if sample.sample.name == fault.suspect.sample)
        bad = first_bad(update, blamed, dict(fault.old))
        return Reproduction(batch=batch, fault=fault, findings=fault.findings, grad_norm=float("nan"), bad=bad)
    norm = stats.grad_norm if stats else 0.0
    return Reproduction(batch=batch, fault=None, findings=findings, grad_norm=norm, bad=None)


def load_base(kept: KeptBatch, config: Config) -> Policy:
    """The frozen base of the run, on the CPU."""
    pin_torch(config.compute.learner_threads)
    base = cached_base(config.model)
    if base.digest != kept.base_digest:
        raise DamageError(
            f"The batch was trained on another base model ({kept.base_digest[:12]}, here {base.digest[:12]});"
            " restore the model files that the run began with."
        )
    return load_policy(base, config.model, config.lora, pick_device("cpu"))


def build_update(kept: KeptBatch, policy: Policy, config: Config, progress: Callable[[], None]) -> Update:
    """As it stood before the step, broken values included."""
    install_adapter(policy.adapter, kept.position.adapter, finite=False)
    policy.adapter.requires_grad()
    if config.batch.checkpointing:
        policy.checkpoint_activations()
    optimizer = Optimizer(policy.adapter.parameters(), config.optimizer, config.run.steps)
    optimizer.load_state_bytes(kept.position.optimizer)
    norms = Norms(config.guard)
    norms.load_state_dict(kept.position.norms)
    return Update(policy, optimizer, norms, config, progress, anchor_of(kept, policy, config))


def anchor_of(kept: KeptBatch, policy: Policy, config: Config) -> Anchor | None:
    """What the policy was held to, if anything."""
    if not kept.position.anchor:
        return None
    anchor = Anchor(policy.adapter, config.curriculum)
    anchor.load_state_bytes(kept.position.anchor)
    return anchor
