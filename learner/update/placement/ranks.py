"""The ranks of a learner as processes: how they meet, and what they tell each other.

    meeting      all ranks, once they have loaded: a file in the run's folder, then connections of gloo between them
    from_first   bytes of rank 0 -> all ranks
    gathered     bytes of each rank -> those of all, on all ranks
    to_first     the same, on rank 0
    added        fp32 tensors of each rank -> their sum in the order of the ranks, on all ranks

Only tensors cross: the collectives of torch.distributed for objects pickle. Sums are gathered and added here, since an
all-reduce adds in an order of its own. A rank that dies closes its connections, and the others end with RankLost. There
is no limit on a wait, which may last as long as an evaluation: a process that hangs is ended by its own watchdog, and a
stopped one by the launcher. Who waits calls `meanwhile`. The meeting has none either: rank 0 may have to wait for the
card before it loads, and reads the journal. The launcher ends all ranks if one dies; the log says who keeps the others
waiting.

A rank whose memory runs out tells the others instead of what it found, or after what each does by itself. All of them
then repeat the step in smaller parts (learner/update/budget.py).

gloo neither encrypts nor asks who connects. So connections stay on this machine's loopback interface, unless
GLOO_SOCKET_IFNAME names another one, whose network must be trusted.
"""

import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load
from torch import nn
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from learner.update.placement.placement import (
    ALL,
    Cut,
    Done,
    Form,
    Owners,
    Tensors,
    give_gradients,
    rank_of_each,
    take_gradients,
    tokens_of_rank,
)
from shared.errors import RankLost, in_words
from shared.process.lease import nothing, poll
from shared.run.failpoints import reach
from shared.run.files import make_folder
from shared.tensor_file import tensor_bytes

INTERFACE = "GLOO_SOCKET_IFNAME"
LOOPBACK = "lo"
MEETING = "ranks-"
"""Beginning of the name of the file where ranks meet."""
NO_LIMIT = timedelta(days=365)
CAME = "rank {}"
SUMMED_AT_ONCE = 2**22
"""Values of a gradient: 16 MiB of each rank."""
OUT_OF_MEMORY, FITS = b"", b"1"
Add = Callable[[list[torch.Tensor]], Sequence[torch.Tensor | None]]
"""A gradient of each rank -> the sums that this rank has."""

log = logging.getLogger(__name__)


class RankGroup:
    """All ranks, seen from one of them."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.meanwhile: Callable[[], None] = nothing

    def from_first(self, data: bytes = b"") -> bytes:
        """data: on rank 0."""
        count = torch.tensor([len(data)])
        self.finish(lambda: dist.broadcast(count, src=0, async_op=True))
        row = as_tensor(data) if self.rank == 0 else torch.empty(int(count), dtype=torch.uint8)
        if len(row):
            self.finish(lambda: dist.broadcast(row, src=0, async_op=True))
        return row.numpy().tobytes()

    def gathered(self, data: bytes) -> list[bytes]:
        counts = [int(count) for count in self.all_of(torch.tensor([len(data)]))]
        row = torch.zeros(max(1, *counts), dtype=torch.uint8)
        row[: len(data)] = as_tensor(data)
        return [found[:count].numpy().tobytes() for found, count in zip(self.all_of(row), counts, strict=True)]

    def to_first(self, data: bytes) -> list[bytes]:
        """Elsewhere nothing."""
        counts = [int(count) for count in self.all_of(torch.tensor([len(data)]))]
        row = torch.zeros(max(1, *counts), dtype=torch.uint8)
        row[: len(data)] = as_tensor(data)
        return [found[:count].numpy().tobytes() for found, count in zip(self.all_at(0, row), counts, strict=False)]

    def added(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        flat = torch.cat([tensor.flatten().cpu() for tensor in tensors])
        for part in flat.split(SUMMED_AT_ONCE):
            first, *others = self.all_of(part)
            for other in others:
                first += other
            part.copy_(first)
        sums = flat.split([tensor.numel() for tensor in tensors])
        # Copies, so that what reads them finds them aligned as any tensor, and bits do not depend on where they were.
        return [total.view(one.shape).to(one.device, copy=True) for total, one in zip(sums, tensors, strict=True)]

    def all_of(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        found = [torch.empty_like(tensor) for _ in range(self.size)]
        self.finish(lambda: dist.all_gather(found, tensor, async_op=True))
        return found

    def all_at(self, rank: int, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Those of all ranks on this one; elsewhere nothing."""
        found = [torch.empty_like(tensor) for _ in range(self.size)] if self.rank == rank else None
        self.finish(lambda: dist.gather(tensor, found, dst=rank, async_op=True))
        return found or []

    def give_all(self, rank: int, tensor: torch.Tensor) -> None:
        """What this rank has is written into that of the others."""
        self.finish(lambda: dist.broadcast(tensor, src=rank, async_op=True))

    def finish(self, begin: Callable[[], Any]) -> None:
        """Wait for what `begin` returns."""
        with losing():
            work = begin()
        poll(work.is_completed, self.meanwhile)
        with losing():
            work.wait()


@contextmanager
def losing() -> Iterator[None]:
    """gloo has one error for everything that ends a connection."""
    try:
        yield
    except RuntimeError as error:
        reason = in_words(error)
        raise RankLost(
            f"Another rank of the learner is gone ({reason}); its log says why; `resume` goes on."
        ) from error


def as_tensor(data: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(data, np.uint8).copy())


@contextmanager
def meeting(folder: Path, name: str, *, rank: int, size: int, warn_after_s: float) -> Iterator[RankGroup]:
    """All ranks name the same meeting, which no earlier start of the run had. warn_after_s: after so long, the log
    says who is missing."""
    make_folder(folder)
    place = folder / f"{MEETING}{name}"
    if rank == 0:
        for earlier in folder.glob(f"{MEETING}*"):
            if earlier != place:
                earlier.unlink()
    os.environ.setdefault(INTERFACE, LOOPBACK)
    reach("before ranks meet", str(rank))
    with losing():
        store = dist.FileStore(str(place), size)  # pyright: ignore[reportPrivateImportUsage]
        wait_for_all(store, rank, size, warn_after_s)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=NO_LIMIT)
    reach("after ranks meet", str(rank))
    yield RankGroup(rank, size)
    # Not after an error: gloo would wait for what the others never send. The end of the process closes connections.
    dist.destroy_process_group()


def wait_for_all(store: Store, rank: int, size: int, warn_after_s: float) -> None:
    store.set(CAME.format(rank), "")
    missing, late_at = set(range(size)), time.monotonic() + warn_after_s

    def all_came() -> bool:
        nonlocal late_at
        missing.difference_update([other for other in missing if store.check([CAME.format(other)])])
        if missing and time.monotonic() > late_at:
            late_at = math.inf
            names = ", ".join(map(str, sorted(missing)))
            log.warning(
                "has waited %g s for these ranks of the learner: %s; logs/learnerN.log says what rank N does"
                " (logs/learner.log for rank 0)",
                warn_after_s,
                names,
            )
        return not missing

    poll(all_came, nothing)


class Ranks:
    """One of several processes."""

    def __init__(
        self,
        group: RankGroup,
        parameters: Sequence[nn.Parameter],
        *,
        in_step: bool = False,
        owners: Owners = ALL,
        add: Add | None = None,
    ) -> None:
        """in_step: whether all must make as many passes, because every product needs all ranks (divided.py). add: the
        gradients of all ranks, where not every rank gets every sum (owned.py)."""
        self.group = group
        self.parameters = parameters
        self.in_step = in_step
        self.owners = owners
        self.add = add

    def most_tokens(self, budget: int, total: Callable[[], int]) -> int:
        return tokens_of_rank(budget, total(), self.group.size)

    def each(
        self, cuts: Sequence[Cut], tokens: Callable[[Cut], int], work: Callable[[Cut], Done], form: Form[Done]
    ) -> list[Done]:
        places = rank_of_each([tokens(part) for part in cuts], self.group.size)
        mine = {n: part for n, part in enumerate(cuts) if places[n] == self.group.rank}
        done = packed_or_out_of_memory(mine, work, form)
        if self.in_step:
            self.wait_in_step(places, lambda: work(cuts[-1]))
        told = self.exchanged(done)
        found = {n: form.unpack(tensors) for data in told for n, tensors in unpacked(data).items()}
        return [found[n] for n in range(len(cuts))]

    def gradient(
        self, cuts: Sequence[Cut], tokens: Callable[[Cut], int], work: Callable[[Cut], Done], form: Form[Done]
    ) -> list[Done]:
        found = self.each(cuts, tokens, work, form)
        rank = str(self.group.rank)
        reach("before ranks add gradients", rank)
        # Twice, as a rank without memory must not leave the others in the sum.
        mine = self.together(lambda: take_gradients(self.parameters))
        sums = self.together(lambda: (self.add or self.group.added)(mine))
        reach("after ranks add gradients", rank)
        give_gradients(self.parameters, sums)
        return found

    def together(self, work: Callable[[], Done]) -> Done:
        done: list[Done] = []
        with suppress(torch.OutOfMemoryError):
            done.append(work())
        self.exchanged(FITS if done else OUT_OF_MEMORY)
        return done[0]

    def exchanged(self, mine: bytes) -> list[bytes]:
        """What each rank has; OutOfMemoryError on all of them if memory ran out on one."""
        told = self.group.gathered(mine)
        if OUT_OF_MEMORY in told:
            raise torch.OutOfMemoryError(f"rank {told.index(OUT_OF_MEMORY)} of the learner ran out of memory")
        return told

    def wait_in_step(self, places: Sequence[int], pass_again: Callable[[], object]) -> None:
        """While others have micro-batches left, repeat one for each of them, and keep nothing of it. places: the rank
        of each micro-batch."""
        counts = [places.count(rank) for rank in range(self.group.size)]
        kept = [one.grad for one in self.parameters]
        give_gradients(self.parameters, [None] * len(kept))
        for _ in range(max(counts) - counts[self.group.rank]):
            pass_again()
        give_gradients(self.parameters, kept)


def packed_or_out_of_memory(cuts: dict[int, Cut], work: Callable[[Cut], Done], form: Form[Done]) -> bytes:
    try:
        return packed({n: form.pack(work(part)) for n, part in cuts.items()})
    except torch.OutOfMemoryError:
        return OUT_OF_MEMORY


def packed(found: dict[int, Tensors]) -> bytes:
    """By number of the micro-batch, as a safetensors file."""
    named = ((f"{n}.{name}", value) for n, one in found.items() for name, value in one.items())
    return tensor_bytes({name: value.detach().cpu() for name, value in named})


def unpacked(data: bytes) -> dict[int, Tensors]:
    found: dict[int, Tensors] = {}
    for key, value in load(data).items():
        number, _, name = key.partition(".")
        found.setdefault(int(number), {})[name] = value
    return found
