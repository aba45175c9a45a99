"""Who computes the micro-batches of a step: this process alone, or the ranks of the learner.

    each       work on every micro-batch -> what it found in each, in their order
    gradient   the same for work that adds to gradients, of which there are none before; afterwards the parameters have
               g_0 + g_1 + ... , added in this order, with g_r what the micro-batches of rank r gave

A rank is a process with a learner of its own: the same adapter, optimizer, plan and guard. All of them build the batch
of a step from the same groups, so entropy mask, advantages and divisors are those of the whole step. Each computes its
share of the micro-batches, all are told what was found in every one of them, and from then on all do the same again:
checks, clipping, the optimizer's step. Micro-batches go to ranks by their tokens, the largest first, each to the rank
that has the fewest; they are cut small enough that every rank gets one. The order of all sums is fixed, so bits repeat
for a number of ranks. Another number gives the same gradient up to rounding.

    ALONE     one process, without any of this
    InTurns   the ranks one after the other in one process, with the bits of several: for replay
    Ranks     several processes (ranks.py), each with the whole base or a part of it (divided.py)

Which of the parameters a process steps is for its Owners to say: ALL of them, or those that it owns (owned.py). Then it
has the sum of the gradients of these only, and none for the others.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch
from torch import nn

from learner.objective.batch import TrainSample

Done = TypeVar("Done")
Cut = list[TrainSample]
"""A micro-batch."""
Tensors = dict[str, torch.Tensor]


class Owners(Protocol):
    """What the optimizer asks about the parameters that it steps. All ranks call the same methods in the same order."""

    def has(self, number: int) -> bool:
        """Whether this process steps the parameter with this place in their order."""
        ...

    def total_norm(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """Of all parameters, from those that this process steps."""
        ...

    def share(self, parameters: Sequence[nn.Parameter]) -> None:
        """After a step: all parameters have their new values on all ranks."""
        ...

    def states(self, mine: Tensors) -> list[Tensors]:
        """On rank 0 those of all ranks; elsewhere this rank's own."""
        ...


class Everything:
    """Of a process that steps all of them."""

    def has(self, number: int) -> bool:
        return True

    def total_norm(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        return nn.utils.get_total_norm(gradients)

    def share(self, parameters: Sequence[nn.Parameter]) -> None:
        """There is nobody without them."""

    def states(self, mine: Tensors) -> list[Tensors]:
        return [mine]


ALL = Everything()


@dataclass(frozen=True, kw_only=True)
class Form(Generic[Done]):
    """How what was found in a micro-batch is told to other ranks."""

    pack: Callable[[Done], Tensors]
    unpack: Callable[[Tensors], Done]


class Placement(Protocol):
    """See above. All ranks call the same methods with the same micro-batches, in the same order."""

    @property
    def owners(self) -> Owners:
        """Who steps what."""
        ...

    def most_tokens(self, budget: int, total: Callable[[], int]) -> int:
        """Of a micro-batch. budget: what fits. total: tokens of all samples."""
        ...

    def each(
        self, cuts: Sequence[Cut], tokens: Callable[[Cut], int], work: Callable[[Cut], Done], form: Form[Done]
    ) -> list[Done]: ...

    def gradient(
        self, cuts: Sequence[Cut], tokens: Callable[[Cut], int], work: Callable[[Cut], Done], form: Form[Done]
    ) -> list[Done]: ...

    def together(self, work: Callable[[], Done]) -> Done:
        """Work that every rank does by itself; memory that runs out on one of them runs out on all."""
        ...


class Alone:
    """One process."""

    owners: Owners = ALL

    def most_tokens(self, budget: int, total: Callable[[], int]) -> int:
        return budget

    def each(
        self, cuts: Sequence[Cut], tokens: Callable[[Cut], int], work: Callable[[Cut], Done], form: Form[Done]
    ) -> list[Done]:
        return [work(part) for part in cuts]

    def gradient(
        self, cuts: Sequence[Cut], tokens: Callable[[Cut], int], work: Callable[[Cut], Done], form: Form[Done]
    ) -> list[Done]:
        return [work(part) for part in cuts]

    def together(self, work: Callable[[], Done]) -> Done:
        return work()


ALONE = Alone()


class InTurns:
    """So many ranks in one process."""

    owners: Owners = ALL

    def __init__(self, parameters: Sequence[nn.Parameter], ranks: int = 1) -> None:
        self.parameters = parameters
        self.ranks = ranks

    def most_tokens(self, budget: int, total: Callable[[], int]) -> int:
        return tokens_of_rank(budget, total(), self.ranks)

    def each(
        self, cuts: Sequence[Cut], tokens: Callable[[Cut], int], work: Callable[[Cut], Done], form: Form[Done]
    ) -> list[Done]:
        return [work(part) for part in cuts]

    def gradient(
        self, cuts: Sequence[Cut], tokens: Callable[[Cut], int], work: Callable[[Cut], Done], form: Form[Done]
    ) -> list[Done]:
        places = rank_of_each([tokens(part) for part in cuts], self.ranks)
        found: dict[int, Done] = {}
        sums: list[torch.Tensor] = []
        for rank in range(self.ranks):
            found |= {n: work(part) for n, part in enumerate(cuts) if places[n] == rank}
            theirs = take_gradients(self.parameters)
            sums = [total.add_(one) for total, one in zip(sums, theirs, strict=True)] if rank else theirs
        give_gradients(self.parameters, sums)
        return [found[n] for n in range(len(cuts))]

    def together(self, work: Callable[[], Done]) -> Done:
        return work()


def tokens_of_rank(budget: int, total: int, ranks: int) -> int:
    """Most tokens of a micro-batch, so that every rank gets one."""
    return max(1, min(budget, -(-total // ranks)))


def rank_of_each(sizes: Sequence[int], ranks: int) -> list[int]:
    """Of micro-batches with so many tokens, or of tensors with so many values."""
    places, loads = [0] * len(sizes), [0] * ranks
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        places[number] = loads.index(min(loads))
        loads[places[number]] += sizes[number]
    return places


def take_gradients(parameters: Sequence[nn.Parameter]) -> list[torch.Tensor]:
    """Zeros where there is none; none is left."""
    found = [torch.zeros_like(one) if one.grad is None else one.grad for one in parameters]
    give_gradients(parameters, [None] * len(parameters))
    return [gradient.detach() for gradient in found]


def give_gradients(parameters: Sequence[nn.Parameter], gradients: Sequence[torch.Tensor | None]) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
