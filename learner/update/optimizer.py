"""AdamW on the fp32 adapter, with warm-up and schedule, and its state as bytes.

    lr(s) = peak * (s + 1) / warmup               while s < warmup
    lr(s) = peak * (f + (1 - f) * shape(x))       after, x in [0, 1] the way to the last step,
                                                  shape = 1 (constant), 1 - x (linear), (1 + cos pi x) / 2 (cosine)

The first step already has a rate above zero. Moments are fp32; they are stored as safetensors, never as a pickle.

Memory never runs out in the middle of a step, which could not be taken back: the moments are made at the start, and
what AdamW allocates within a step, one tensor the size of each parameter, is asked for and given back before it.
"""

import math
from collections.abc import Mapping

import torch
from safetensors.torch import load, save
from torch import nn

from shared.config.tree import OptimizerConfig
from shared.errors import DamageError
from shared.run.failpoints import reach

MOMENTS = ("exp_avg", "exp_avg_sq")
"""PyTorch's names."""


class Optimizer:
    """Steps a set of named parameters."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], config: OptimizerConfig, steps: int) -> None:
        self.parameters = dict(parameters)
        self.config = config
        self.steps = steps
        betas = (config.beta1, config.beta2)
        self.adamw = torch.optim.AdamW(
            list(self.parameters.values()), lr=config.lr, betas=betas, weight_decay=config.weight_decay, foreach=True
        )
        for parameter in self.parameters.values():
            zeros = {name: torch.zeros_like(parameter, requires_grad=False) for name in MOMENTS}
            self.adamw.state[parameter] = {"step": torch.tensor(0.0), **zeros}

    def zero_grad(self) -> None:
        self.adamw.zero_grad(set_to_none=True)

    def clip(self) -> float:
        """Scale the gradient down to the configured norm; returns the norm before."""
        parameters = list(self.parameters.values())
        return float(nn.utils.clip_grad_norm_(parameters, self.config.max_grad_norm))

    def step(self, step: int) -> float:
        """Apply the gradient of this training step; returns the rate used."""
        rate = learning_rate(self.config, step, self.steps)
        for group in self.adamw.param_groups:
            group["lr"] = rate
        self.reserve()
        reach("before learner steps")
        self.adamw.step()
        reach("after learner steps")
        return rate

    def reserve(self) -> None:
        """Have the memory of a step in the allocator's cache; where it is not, this fails and not the step."""
        temporary = [torch.empty_like(parameter) for parameter in self.parameters.values()]
        del temporary

    def all_finite(self) -> bool:
        """Whether the parameters have a norm that is a number."""
        return math.isfinite(float(nn.utils.get_total_norm(list(self.parameters.values()))))

    def state_bytes(self) -> bytes:
        """Moments and counters of every parameter."""
        tensors: dict[str, torch.Tensor] = {}
        for name, parameter in self.parameters.items():
            for key, value in self.adamw.state[parameter].items():
                tensors[f"{name}.{key}"] = value.detach().cpu().contiguous()
        return save(tensors)

    def load_state_bytes(self, data: bytes) -> None:
        tensors = load(data)
        self.adamw.state.clear()
        named = {key.rpartition(".")[0] for key in tensors}
        if missing := sorted(self.parameters.keys() - named):
            raise DamageError(f"The optimizer state has nothing for '{missing[0]}'; it belongs to another adapter.")
        for name, parameter in self.parameters.items():
            keys = [key for key in tensors if key.rpartition(".")[0] == name]
            state = {key.rpartition(".")[2]: tensors.pop(key) for key in keys}
            moments = {key: value.to(parameter.device) for key, value in state.items() if key != "step"}
            self.adamw.state[parameter] = {"step": state["step"], **moments}
        if tensors:
            raise DamageError(f"The optimizer state names '{min(tensors)}', which this adapter does not have.")


def learning_rate(config: OptimizerConfig, step: int, steps: int) -> float:
    """The rate of step `step` of `steps`."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    way = (step - config.warmup_steps) / max(1, steps - 1 - config.warmup_steps)
    match config.schedule:
        case "constant":
            return config.lr
        case "linear":
            shape = 1 - way
        case "cosine":
            shape = (1 + math.cos(math.pi * way)) / 2
    return config.lr * (config.final_lr_fraction + (1 - config.final_lr_fraction) * shape)
