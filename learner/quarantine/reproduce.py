"""A quarantined batch once more, alone: the same update on the CPU, and where its numbers first go wrong.

Everything comes from the file but the frozen base, which must be the one named there. A fault that a card's bf16 made
may not come back in fp32; that is said, not hidden.

Where the numbers of one sample first go wrong: the first tensor, in the order of computing, that is not finite.

    adapter -> batch (actor's log-probs, advantage) -> outputs of modules, forward -> log-probs -> gradients, backward

Where all of them are finite (a spike), the adapter entry with the largest gradient is named instead.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from learner.objective.batch import StepBatch, TrainSample
from learner.objective.judged import Judge, collected
from learner.quarantine.quarantine import KeptBatch
from learner.update.batches import Batches
from learner.update.forward_pass import UNCHANGED, OldLogprobs
from learner.update.gradient_check import Finding, NumericalFault
from learner.update.update import Update
from shared.errors import DamageError

Where = Literal["adapter", "batch", "forward", "backward", "gradient"]


@dataclass(frozen=True, kw_only=True)
class BadTensor:
    """A tensor to look at."""

    where: Where
    """`gradient`: nothing is broken, this gradient is the largest."""
    name: str
    """Adapter entry, field of the batch, or module of the backbone."""
    value: str
    """What is wrong with it, in words."""


class Watch:
    """Notes modules whose output, or whose output's gradient, is not finite, as they come."""

    def __init__(self) -> None:
        self.forward: list[str] = []
        self.backward: list[str] = []

    @contextmanager
    def over(self, backbone: nn.Module) -> Iterator[None]:
        """Inner modules end before the outer ones they are part of, so the first to be noted is the place."""
        handles = [
            module.register_forward_hook(lambda _, __, output, name=name or "backbone": self.seen(name, output))
            for name, module in backbone.named_modules()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def seen(self, name: str, output: Any) -> None:
        tensor = output[0] if isinstance(output, tuple) else getattr(output, "last_hidden_state", output)
        if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
            return
        if not finite(tensor):
            self.forward.append(name)
        if tensor.requires_grad:
            # Into a list: a hook's return value would replace the gradient.
            tensor.register_hook(lambda grad: None if finite(grad) else self.backward.append(name))


def first_bad(update: Update, sample: TrainSample, old: OldLogprobs) -> BadTensor:
    """One pass over this sample alone; leaves no gradient behind."""
    parameters = update.optimizer.parameters
    broken = [name for name, value in parameters.items() if not finite(value)]
    if broken:
        return BadTensor(where="adapter", name=broken[0], value="has values that are not finite")
    if field := broken_field(sample):
        return BadTensor(where="batch", name=field, value="is not finite")
    watch = Watch()
    update.optimizer.zero_grad()
    with watch.over(update.policy.backbone), update.forward_pass.through_modules():
        loss = update.backward([sample], old).loss
    gradients = {name: value.grad for name, value in parameters.items() if value.grad is not None}
    update.optimizer.zero_grad()
    if watch.forward or not finite(loss):
        name = watch.forward[0] if watch.forward else "lm_head"
        return BadTensor(where="forward", name=name, value="puts out values that are not finite")
    return watch_gradients(watch, gradients)


def watch_gradients(watch: Watch, gradients: Mapping[str, torch.Tensor]) -> BadTensor:
    bad = watch.backward or [name for name, grad in gradients.items() if not finite(grad)]
    if bad:
        return BadTensor(where="backward", name=bad[0], value="gets a gradient that is not finite")
    norms = {name: float(grad.norm()) for name, grad in gradients.items()}
    largest = max(norms, key=lambda name: norms[name])
    return BadTensor(where="gradient", name=largest, value=f"has the largest gradient, of norm {norms[largest]:.4g}")


def broken_field(sample: TrainSample) -> str:
    """What came with the sample and is no number; empty if nothing."""
    fields = {
        "actor_logprobs": sample.sample.actor_logprobs,
        "advantage": sample.sample.advantage,
        "weight": sample.weight,
    }
    return next((name for name, value in fields.items() if not np.isfinite(value).all()), "")


def finite(tensor: torch.Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())


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


def reproduce(kept: KeptBatch, judge: Judge, batches: Batches, update: Update) -> Reproduction:
    """Restore the position before the step, apply the batch, look at what happened. update: on the CPU, of the
    batch's own config."""
    if update.policy.base_digest != kept.base_digest:
        raise DamageError(
            f"The batch was trained on another base model ({kept.base_digest[:12]}, here"
            f" {update.policy.base_digest[:12]}); restore the model files that the run began with."
        )
    update.restore(kept.position)
    batch = replace(batches.build(kept.step, collected(kept.filled, judge)), on_policy=False)
    alone = {finding.sample: finding for finding in update.each_alone(batch.used, UNCHANGED)}
    try:
        stats = update.apply(kept.step, batch)
    except NumericalFault as fault:
        blamed = next(sample for sample in batch.used if sample.sample.name == fault.suspect.sample)
        bad = first_bad(update, blamed, OldLogprobs(by_sample=fault.old))
        # A step may have several updates, and a fault knows the samples of one.
        found = tuple((alone | {finding.sample: finding for finding in fault.findings}).values())
        return Reproduction(batch=batch, fault=fault, findings=found, grad_norm=float("nan"), bad=bad)
    return Reproduction(batch=batch, fault=None, findings=tuple(alone.values()), grad_norm=stats.grad_norm, bad=None)
