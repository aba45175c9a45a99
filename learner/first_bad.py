"""Where the numbers of one sample first go wrong: the first tensor, in the order of computing, that is not finite.

    adapter -> batch (actor's log-probs, advantage) -> outputs of modules, forward -> log-probs -> gradients, backward

Where all of them are finite (a spike), the adapter entry with the largest gradient is named instead.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from learner.batch import TrainSample
from learner.update import Update

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
        """A module is done."""
        tensor = output[0] if isinstance(output, tuple) else getattr(output, "last_hidden_state", output)
        if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
            return
        if not finite(tensor):
            self.forward.append(name)
        if tensor.requires_grad:
            # Into a list: a hook's return value would replace the gradient.
            tensor.register_hook(lambda grad: None if finite(grad) else self.backward.append(name))


def first_bad(update: Update, sample: TrainSample, old: dict[str, torch.Tensor]) -> BadTensor:
    """One pass over this sample alone; leaves no gradient behind."""
    parameters = update.optimizer.parameters
    broken = [name for name, value in parameters.items() if not finite(value)]
    if broken:
        return BadTensor(where="adapter", name=broken[0], value="has values that are not finite")
    if field := broken_field(sample):
        return BadTensor(where="batch", name=field, value="is not finite")
    watch = Watch()
    update.optimizer.zero_grad()
    with watch.over(update.policy.backbone):
        loss = update.backward([sample], old).loss
    gradients = {name: value.grad for name, value in parameters.items() if value.grad is not None}
    update.optimizer.zero_grad()
    if watch.forward or not finite(loss):
        name = watch.forward[0] if watch.forward else "lm_head"
        return BadTensor(where="forward", name=name, value="puts out values that are not finite")
    return watch_gradients(watch, gradients)


def watch_gradients(watch: Watch, gradients: Mapping[str, torch.Tensor]) -> BadTensor:
    """The way back."""
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
    """All of it."""
    return bool(torch.isfinite(tensor).all())
