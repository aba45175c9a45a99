"""What a policy is kept close to after a stage: the adapter at its end, and how much each weight mattered.

    set        at the end of a stage: theta* = the adapter as it is, F <- decay F + F_k, F_k normalised to mean 1
    pull       in every pass after that: the gradient of lambda / 2 sum F (dW - dW*)^2 is added (ewc.py)
    reference  for `curriculum.kl_to`: inside, the model is the policy at the stage's start, or before the first step

Until a stage has ended there is no pull, and the reference is what the run began with: the base, or the adapter that
it starts from. F is kept in bf16 on the CPU, two bytes a weight that has an adapter, and visits the device
layer by layer; A* and B* are fp32, and dW* is their product. All of it is one file of a checkpoint.
Left out on purpose: one F a stage (the sum is what the online form keeps), a Fisher that couples weights.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager

import torch
from safetensors.torch import load

from learner.continual.ewc import add_penalty, delta
from learner.continual.fisher import merged, normalised
from shared.config.data import CurriculumConfig
from shared.model.layers.lora import PAIR, Adapter
from shared.run.files import FileParts
from shared.tensor_file import tensor_parts

FISHER = ".fisher"
START = "start:"
STAGE = "stage"
Gradients = Mapping[str, torch.Tensor]
"""Of `layer.lora_A` and `layer.lora_B`, as far as this process steps them."""


class Anchor:
    """An adapter to come back to."""

    def __init__(self, adapter: Adapter, config: CurriculumConfig) -> None:
        self.adapter = adapter
        self.config = config
        self.stage = 0
        """Stages that have ended."""
        self.theta: dict[str, torch.Tensor] = {}
        """`layer.lora_A` and `layer.lora_B` at the end of the last of them; empty before."""
        self.start = adapter.values() if config.kl_to != "base" and adapter.moved else {}
        """The same before the first step; empty if that is the base, or if the KL is to the base anyway."""
        self.fisher: dict[str, torch.Tensor] = {}
        """Layer -> [out, in] bf16 F; empty before, and where curriculum.ewc = 0."""

    def set(self, stage: int, fisher: Mapping[str, torch.Tensor]) -> None:
        """The stage before `stage` is over. fisher: [out, in] of each layer, or nothing where it is not asked for."""
        self.stage = stage
        self.theta = self.adapter.values()
        if fisher:
            older = {name: values.float() for name, values in self.fisher.items()}
            both = merged(older, normalised(fisher), self.config.ewc_decay)
            self.fisher = {name: values.to(torch.bfloat16) for name, values in both.items()}

    def pull(self, gradients: Gradients) -> float:
        """Add the penalty's gradient to these; the penalty, 0 before the first stage has ended."""
        parts = [self.pull_layer(name, gradients) for name in sorted(self.fisher)]
        return sum(torch.stack(parts).tolist()) if parts else 0.0

    def pull_layer(self, name: str, gradients: Gradients) -> torch.Tensor:
        layer = self.adapter.layers[name]
        device = layer.lora_A.device
        a, b = (self.theta[f"{name}.{half}"].to(device) for half in PAIR)
        fisher = self.fisher[name].to(device, torch.float32)
        a_grad, b_grad = (gradients.get(f"{name}.{half}") for half in PAIR)
        return add_penalty(layer, delta(a, b, layer.scale), fisher, self.config.ewc, a_grad, b_grad)

    def reference(self) -> AbstractContextManager[None]:
        """Inside, the model is what the objective's KL is taken to."""
        values = (self.theta if self.config.kl_to == "stage" else {}) or self.start
        return self.adapter.holding(values) if values else self.adapter.switched_off()

    def most_bytes(self) -> int:
        """How large its file may become."""
        pairs = sum(value.nbytes for value in self.adapter.parameters().values())
        weights = sum(layer.lora_B.shape[0] * layer.lora_A.shape[1] for layer in self.adapter.layers.values())
        kept = self.config.needs_stages + bool(self.start)
        return pairs * kept + 2 * weights * (self.config.ewc > 0.0)

    def state_bytes(self) -> bytes:
        return b"".join(self.state_parts())

    def state_parts(self) -> FileParts:
        """In the memory of these tensors."""
        fishers = {f"{name}{FISHER}": values for name, values in self.fisher.items()}
        start = {f"{START}{name}": values for name, values in self.start.items()}
        return tensor_parts(self.theta | start | fishers | {STAGE: torch.tensor(self.stage)})

    def load_state_bytes(self, data: bytes) -> None:
        tensors = load(data)
        self.stage = int(tensors.pop(STAGE))
        self.fisher = {name.removesuffix(FISHER): t for name, t in tensors.items() if name.endswith(FISHER)}
        self.start = {name.removeprefix(START): t for name, t in tensors.items() if name.startswith(START)}
        self.theta = {n: t for n, t in tensors.items() if not n.endswith(FISHER) and not n.startswith(START)}
