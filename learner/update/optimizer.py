"""AdamW on the fp32 adapter, with warm-up and schedule, and its state as a file.

    lr(s) = peak * (s + 1) / warmup               while s < warmup
    lr(s) = peak * (f + (1 - f) * shape(x))       after, x in [0, 1] the way to the last step,
                                                  shape = 1 (constant), 1 - x (linear), (1 + cos pi x) / 2 (cosine)

The first step already has a rate above zero. Moments are fp32; they are stored as safetensors, never as a pickle.

Memory never runs out in the middle of a step, which could not be taken back: the moments are made at the start, and
what AdamW allocates within a step on a card, one tensor the size of each parameter, is asked for and given back before
it. On a CPU it goes over each parameter once and allocates nothing; there, asking costs nothing.

    owners   which parameters this process steps (placement/placement.py); it has the moments of these alone
    home     where it steps them, if not where they are: values, gradient and moments of the owned ones are there too,
             and new values are copied back (compute.parallel = "zero2": host memory, for a policy on a card)
"""

import math
from collections.abc import Mapping

import torch
from safetensors.torch import load
from torch import nn

from learner.update.placement.placement import ALL, Owners
from shared.config.tree import OptimizerConfig
from shared.errors import DamageError
from shared.run.failpoints import reach
from shared.run.files import FileParts
from shared.tensor_file import tensor_bytes, tensor_parts

MOMENTS = ("exp_avg", "exp_avg_sq")
"""PyTorch's names."""


class Optimizer:
    """Steps a set of named parameters."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        config: OptimizerConfig,
        steps: int,
        owners: Owners = ALL,
        home: torch.device | None = None,
    ) -> None:
        self.parameters = dict(parameters)
        self.owners = owners
        self.stepped = {
            name: at_home(parameter, home)
            for number, (name, parameter) in enumerate(self.parameters.items())
            if owners.has(number)
        }
        """What AdamW has: the parameters themselves, or others of their size at home."""
        self.config = config
        self.steps = steps
        betas = (config.beta1, config.beta2)
        # A group, since a rank may own nothing.
        group = {"params": [*self.stepped.values()]}
        # This takes a quarter of the time of one operation after the other.
        on_cpu = all(parameter.is_cpu for parameter in self.stepped.values())
        form = {"fused": True} if on_cpu else {"foreach": True}
        self.adamw = torch.optim.AdamW([group], lr=config.lr, betas=betas, weight_decay=config.weight_decay, **form)
        for parameter in self.stepped.values():
            zeros = {name: torch.zeros_like(parameter, requires_grad=False) for name in MOMENTS}
            self.adamw.state[parameter] = {"step": torch.tensor(0.0), **zeros}

    def zero_grad(self) -> None:
        self.adamw.zero_grad(set_to_none=True)
        for parameter in self.parameters.values():
            parameter.grad = None

    def bring_home(self) -> None:
        """The gradient in the parameters, to where it is stepped."""
        for name, stepped in self.stepped.items():
            parameter = self.parameters[name]
            if stepped is not parameter and parameter.grad is not None:
                stepped.grad, parameter.grad = parameter.grad.to(stepped.device, copy=True), None

    def gradients(self) -> dict[str, torch.Tensor]:
        """Of the parameters that this process steps."""
        return {name: one.grad for name, one in self.stepped.items() if one.grad is not None}

    def clip(self) -> float:
        """Scale the gradient down to the configured norm; returns the norm before, of all parameters."""
        norm = self.owners.total_norm([*self.gradients().values()])
        nn.utils.clip_grads_with_norm_(self.stepped.values(), self.config.max_grad_norm, norm)
        return float(norm)

    def step(self, step: int) -> float:
        """Apply the gradient of this training step, after `reserve`; returns the rate used."""
        rate = learning_rate(self.config, step, self.steps)
        for group in self.adamw.param_groups:
            group["lr"] = rate
        reach("before learner steps")
        self.copy_values(to_home=True)
        self.adamw.step()
        self.copy_values(to_home=False)
        reach("after learner steps")
        self.owners.share([*self.parameters.values()])
        return rate

    @torch.no_grad()
    def copy_values(self, *, to_home: bool) -> None:
        """Each time, since others may have changed the parameters (Update.restore)."""
        for name, stepped in self.stepped.items():
            if (parameter := self.parameters[name]) is not stepped:
                target, source = (stepped, parameter) if to_home else (parameter, stepped)
                target.copy_(source)

    def reserve(self) -> None:
        """Have the memory of a step in the allocator's cache; where it is not, this fails and not the step."""
        temporary = [torch.empty_like(parameter) for parameter in self.stepped.values()]
        del temporary

    def all_finite(self) -> bool:
        """Whether the parameters have a norm that is a number."""
        return math.isfinite(float(nn.utils.get_total_norm(list(self.parameters.values()))))

    def state_bytes(self) -> bytes:
        """Moments and counters of every parameter; all ranks call this together, and only rank 0 has them all."""
        return b"".join(self.state_parts())

    def state_parts(self) -> FileParts:
        """The same, in the memory of the moments where they are on the CPU and this process has them all."""
        tensors: dict[str, torch.Tensor] = {}
        for state in self.owners.states(self.own_state()):
            tensors |= state
        return tensor_parts(tensors)

    def own_state_bytes(self) -> bytes:
        """Of those that this process steps."""
        return tensor_bytes(self.own_state())

    def own_state(self) -> dict[str, torch.Tensor]:
        return {
            f"{name}.{key}": value.detach().cpu().contiguous()
            for name, parameter in self.stepped.items()
            for key, value in self.adamw.state[parameter].items()
        }

    def load_state_bytes(self, data: bytes) -> None:
        """data: of every parameter, or of those that this process steps."""
        tensors = load(data)
        self.adamw.state.clear()
        named = {key.rpartition(".")[0] for key in tensors}
        if missing := sorted(self.stepped.keys() - named):
            raise DamageError(f"The optimizer state has nothing for '{missing[0]}'; it belongs to another adapter.")
        for name, parameter in self.stepped.items():
            keys = [key for key in tensors if key.rpartition(".")[0] == name]
            state = {key.rpartition(".")[2]: tensors.pop(key) for key in keys}
            moments = {key: value.to(parameter.device) for key, value in state.items() if key != "step"}
            self.adamw.state[parameter] = {"step": state["step"], **moments}
        if foreign := [key for key in tensors if key.rpartition(".")[0] not in self.parameters]:
            raise DamageError(f"The optimizer state names '{min(foreign)}', which this adapter does not have.")


def at_home(parameter: nn.Parameter, home: torch.device | None) -> nn.Parameter:
    """Itself where it is at home."""
    if home is None or parameter.device == home:
        return parameter
    return nn.Parameter(torch.empty_like(parameter, device=home))


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
