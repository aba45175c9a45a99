"""A base of which each rank has a part (compute.parallel = "fsdp2"), for models that no single one can hold.

    kept      of the weight of each linear of the decoder, one N-th of the rows, divided by PyTorch's fully_shard
    product   all ranks gather the whole weight, multiply, and free it; once more on the way back

One whole weight is in memory at a time, as one is where NF4 codes are dequantised for a product. A gathered weight has
the bits of the divided one, so the results are those of "ddp" to the bit. All ranks must have the same products in the
same order. So they make as many passes (ranks.py), and keys that would let them differ are refused
(shared/config/processes.py). Adapter, embeddings, norms and head are whole on every rank.

The gathering is our own, so that who waits for it calls `meanwhile`, and a rank that dies ends the others. Left out:
codes, which are no matrix with rows; cards, where nobody has tried this yet; gathering the next weight during a
product; the pages of the base's file that loading has read, which the system takes back when it needs memory.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from learner.update.placement.ranks import RankGroup, losing
from shared.errors import ModelError
from shared.model.layers.lora import FrozenLinear
from shared.model.layers.products import gradient_product, weight_product
from shared.model.policy import Policy
from shared.run.failpoints import reach


def divide_base(policy: Policy, group: RankGroup) -> None:
    """All ranks call this at the same time."""
    if policy.device.type != "cpu":
        raise ModelError(
            f"compute.parallel = 'fsdp2' computes on CPUs only as yet, and this learner has {policy.device}; set it to"
            " 'ddp', or compute.device to 'cpu'."
        )
    # Imported here, since only this needs it.
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    with losing():
        mesh = init_device_mesh(policy.device.type, (group.size,))
    for linear in frozen_linears(policy):
        weight = linear.matmul.dense
        assert weight is not None
        holder: Any = fully_shard(Holder(weight), mesh=mesh)
        holder.set_custom_all_gather(Gathering(group))
        linear.matmul = DividedMatmul(holder, str(group.rank))


def frozen_linears(policy: Policy) -> list[FrozenLinear]:
    """Of the decoder, in a fixed order."""
    return [module for module in policy.backbone.modules() if isinstance(module, FrozenLinear)]


class Holder(nn.Module):
    """One weight."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)


class Gathering:
    """How the parts of a weight come together; what fully_shard calls a custom all-gather."""

    def __init__(self, ranks: RankGroup) -> None:
        self.ranks = ranks

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """As bytes, which have no type that gloo may not know. It has come when this returns."""
        parts, mine = [*output_tensor.view(torch.uint8).chunk(self.ranks.size)], input_tensor.view(torch.uint8)
        self.ranks.finish(lambda: dist.all_gather(parts, mine, group=group, async_op=True))


class DividedMatmul:
    """A dense weight, of which this rank has some rows."""

    dense = None

    def __init__(self, holder: Any, rank: str) -> None:
        self.holder = holder
        self.rank = rank

    def tensors(self) -> dict[str, torch.Tensor]:
        """What this rank has."""
        return {"weight": self.holder.weight.to_local()}

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if torch.is_grad_enabled() and x.requires_grad:
            return DividedProduct.apply(x, bias, self)  # pyright: ignore[reportReturnType]
        with self.whole() as weight:
            return weight_product(x, weight, bias)

    def input_gradient(self, grad: torch.Tensor, total: torch.Tensor | None = None) -> torch.Tensor:
        with self.whole() as weight:
            return gradient_product(grad, weight, total)

    @contextmanager
    def whole(self) -> Iterator[torch.Tensor]:
        """[out, in] inside the block."""
        reach("before ranks gather a weight", self.rank)
        # What an inference makes cannot be written to later, and fully_shard keeps the tensors of its first gathering.
        with torch.inference_mode(mode=False):
            self.holder.unshard()
        reach("after ranks gather a weight", self.rank)
        try:
            yield self.holder.weight
        finally:
            self.holder.reshard()


class DividedProduct(torch.autograd.Function):
    """Of a linear without an adapter. Autograd would keep the whole weight for the way back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bias: torch.Tensor | None, matmul: DividedMatmul) -> torch.Tensor:
        ctx.matmul = matmul
        with matmul.whole() as weight:
            return weight_product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.matmul.input_gradient(grads[0]), None, None
