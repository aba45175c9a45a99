"""AdamW divided among the ranks, as ZeRO's second stage does it (compute.parallel = "zero2"; Rajbhandari et al. 2020).

    owned     whole tensors of the adapter, by size, the largest first: each has one rank that owns it
    added     the gradients of all ranks for a tensor -> g_0 + g_1 + ..., in this order, on its owner alone
    norm      each owner's norms -> all ranks, which take the norm of these in the order of the parameters
    share     after the step: the new values of each owner -> all ranks
    states    the moments of each owner -> rank 0, for a checkpoint, which is that of "ddp"

Each operation is the one that "ddp" makes on the same whole tensor, so the adapter, the moments and the checkpoint have
its bits on CPUs, and a run may change from one to the other, or to another number of ranks. Of four fp32 values a
parameter (adapter, gradient, two moments) a rank keeps the first for all parameters, and the moments and the gradient's
sum for those that it owns. While it computes it has the gradient of its own micro-batches whole; rank 0 has all moments
while it writes a checkpoint, and every rank while it reads one.

On a card, moments and sums are in host memory and AdamW steps there (learner/update/optimizer.py); gloo goes over the
host anyway. The norms are then the host's, and last bits may differ from those of "ddp". It has run on CPUs only.

DeepSpeed is not used: it has its own order of sums, its own clipping and files, and a resume would not repeat the bits.
Left out: sums while the backward pass still runs (every rank adds up its own micro-batches first, which is what fixes
the order); tensors cut in pieces, whose norms would have other bits.
"""

from collections.abc import Iterator, Sequence

import torch
from safetensors.torch import load
from torch import nn

from learner.update.placement.placement import Tensors, rank_of_each
from learner.update.placement.ranks import SUMMED_AT_ONCE, RankGroup
from shared.run.failpoints import reach
from shared.tensor_file import tensor_bytes


class Owned:
    """The parameters, seen from one of their owners."""

    def __init__(self, group: RankGroup, parameters: Sequence[nn.Parameter]) -> None:
        self.group = group
        self.places = rank_of_each([one.numel() for one in parameters], group.size)
        """The owner of each."""

    def has(self, number: int) -> bool:
        return self.places[number] == self.group.rank

    def added(self, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        mine: dict[int, torch.Tensor] = {}
        for owner, numbers in self.of_each():
            theirs = [gradients[number] for number in numbers]
            total = self.added_at(owner, torch.cat([one.flatten().cpu() for one in theirs]))
            if owner == self.group.rank:
                mine = dict(zip(numbers, split_as(total, theirs), strict=True))
        # Copies, as in RankGroup.added, and after the last sum: a rank without memory must not leave the others in it.
        return [mine[n].to(one.device, copy=True) if n in mine else None for n, one in enumerate(gradients)]

    def added_at(self, owner: int, flat: torch.Tensor) -> torch.Tensor:
        """Elsewhere the tensor as it was."""
        for part in flat.split(SUMMED_AT_ONCE):
            if all_ranks := self.group.all_at(owner, part):
                first, *others = all_ranks
                for other in others:
                    first += other
                part.copy_(first)
        return flat

    def total_norm(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """As nn.utils.get_total_norm computes it: of the norms of all."""
        mine = torch.zeros(len(self.places))
        owned = [number for number in range(len(self.places)) if self.has(number)]
        for number, gradient in zip(owned, gradients, strict=True):
            mine[number] = torch.linalg.vector_norm(gradient)
        rank = str(self.group.rank)
        reach("before ranks tell norms", rank)
        told = self.group.all_of(mine)
        reach("after ranks tell norms", rank)
        return torch.linalg.vector_norm(torch.stack([told[owner][n] for n, owner in enumerate(self.places)]))

    @torch.no_grad()
    def share(self, parameters: Sequence[nn.Parameter]) -> None:
        rank = str(self.group.rank)
        reach("before ranks share parameters", rank)
        for owner, numbers in self.of_each():
            theirs = [parameters[number] for number in numbers]
            flat = torch.cat([one.detach().flatten().cpu() for one in theirs])
            self.group.give_all(owner, flat)
            if owner != self.group.rank:
                for one, value in zip(theirs, split_as(flat, theirs), strict=True):
                    one.copy_(value)
        reach("after ranks share parameters", rank)

    def states(self, mine: Tensors) -> list[Tensors]:
        rank = str(self.group.rank)
        reach("before ranks tell moments", rank)
        told = self.group.to_first(tensor_bytes(mine))
        reach("after ranks tell moments", rank)
        return [load(theirs) for theirs in told] or [mine]

    def of_each(self) -> Iterator[tuple[int, list[int]]]:
        """Each rank that owns something, with the places of its parameters in their order."""
        for owner in range(self.group.size):
            numbers = [number for number, place in enumerate(self.places) if place == owner]
            if numbers:
                yield owner, numbers


def split_as(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    parts = flat.split([one.numel() for one in tensors])
    return [part.view(one.shape) for part, one in zip(parts, tensors, strict=True)]
