"""Ranks of a learner as threads of one process, which tell each other the same as processes do over gloo."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from learner.update.placement.ranks import RankGroup

Done = TypeVar("Done")
WAIT_S = 60.0


class Table:
    """Where each puts what it has, and then sees what all have."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.put: list[object] = [None] * size
        self.barrier = threading.Barrier(size, timeout=WAIT_S)


class ThreadGroup:
    """The part of RankGroup that Ranks and Owned call, seen from one rank."""

    def __init__(self, rank: int, table: Table) -> None:
        self.rank = rank
        self.size = table.size
        self.table = table

    def every(self, mine: Done) -> list[Done]:
        self.table.put[self.rank] = mine
        self.table.barrier.wait()
        found = list(self.table.put)
        self.table.barrier.wait()
        return found  # pyright: ignore[reportReturnType]

    def gathered(self, data: bytes) -> list[bytes]:
        return self.every(data)

    def to_first(self, data: bytes) -> list[bytes]:
        return self.every(data) if self.rank == 0 else self.every(data)[:0]

    def all_of(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return [one.clone() for one in self.every(tensor.clone())]

    def added(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return RankGroup.added(self, tensors)  # pyright: ignore[reportArgumentType]

    def all_at(self, rank: int, tensor: torch.Tensor) -> list[torch.Tensor]:
        return self.all_of(tensor) if self.rank == rank else self.all_of(tensor)[:0]

    def give_all(self, rank: int, tensor: torch.Tensor) -> None:
        tensor.copy_(self.all_of(tensor)[rank])


def on_ranks(size: int, work: Callable[[ThreadGroup], Done]) -> list[Done]:
    """What each rank returns. Sums have the bits of one thread each."""
    table = Table(size)
    with ThreadPoolExecutor(size) as threads:
        return [*threads.map(lambda rank: alone(work, ThreadGroup(rank, table)), range(size))]


def alone(work: Callable[[ThreadGroup], Done], group: ThreadGroup) -> Done:
    torch.set_num_threads(1)
    try:
        return work(group)
    except BaseException:
        group.table.barrier.abort()
        raise
