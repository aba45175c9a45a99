"""Where the frozen base of a process is while another process has the turn.

    release    on the card; only caches are given back (shared/process/lease.py)
    swap       in host memory: one block, pinned if it may be, and a table of which bytes belong to which tensor
    shared     on the card, one copy for both processes (lending.py)

The base never changes, so the block is written once, when the base has been loaded. At the end of a turn the tensors'
memory on the card is freed; at the start of the next one it is taken again and filled from the block. The tensors stay
the same objects, with all views of them, so nothing that computes with the base knows of it. Small tensors stay on the
card: together they are a few megabytes, and every copy is a launch.

Between turns the block is the base, so a check of the base reads the block.
Left out on purpose: CUDA graphs that outlive a turn, since memory that is taken again may have another address.
"""

import logging
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from shared.base.block import CudaBlocks, aligned
from shared.base.checksum import frozen_sums, frozen_tensors, word_sum
from shared.base.lending import Borrower, Lender
from shared.config.processes import ComputeConfig
from shared.errors import in_words
from shared.model.policy import Policy
from shared.process.card import card_facts
from shared.process.lease import ComputeLease, Turn, nothing

log = logging.getLogger("base")

SMALL = 2**13
"""Bytes. Smaller tensors stay."""


Pin = Callable[[int], torch.Tensor]
"""Bytes -> [bytes] uint8 in host memory that a card reads by itself; RuntimeError where the system forbids it."""


class Residency(Protocol):
    """Where the base is between two turns."""

    def sleep(self) -> None:
        """The turn is over."""
        ...

    def wake(self) -> bool:
        """Another begins; True if the base had left the card."""
        ...

    def sums(self) -> dict[str, int]:
        """Of the base where it is now, as in shared/base/checksum.py."""
        ...


class Resident:
    """It stays on its device."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    def sleep(self) -> None:
        """Nothing to do."""

    def wake(self) -> bool:
        return False

    def sums(self) -> dict[str, int]:
        return frozen_sums(self.policy)


class Borrowed:
    """Another process keeps it, and must live while it is used."""

    def __init__(self, policy: Policy, borrower: Borrower) -> None:
        self.policy, self.borrower = policy, borrower

    def sleep(self) -> None:
        self.borrower.check()

    def wake(self) -> bool:
        self.borrower.check()
        return False

    def sums(self) -> dict[str, int]:
        return frozen_sums(self.policy)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One tensor."""

    tensor: torch.Tensor
    """On the device."""
    waiting: torch.Tensor
    """Its values in the block."""

    def free(self) -> None:
        self.tensor.untyped_storage().resize_(0)

    def fill(self) -> None:
        self.tensor.untyped_storage().resize_(self.waiting.nbytes)
        self.tensor.data.copy_(self.waiting, non_blocking=True)


def registered(num_bytes: int) -> torch.Tensor:
    """Pinned where it is. PyTorch's own allocator rounds up to a power of two, up to twice the base."""
    cuda: Any = torch.cuda.cudart()
    block = torch.empty(num_bytes, dtype=torch.uint8)
    if code := int(cuda.cudaHostRegister(block.data_ptr(), num_bytes, 0)):
        # CUDA keeps the error and would report it for the next kernel: this one.
        with suppress(RuntimeError):
            torch.ones(1, device="cuda").add_(1)
        raise RuntimeError(f"CUDA error {code}")
    weakref.finalize(block, cuda.cudaHostUnregister, block.data_ptr()).atexit = False
    return block


def allocated(num_bytes: int) -> torch.Tensor:
    """Pinned by PyTorch, for systems that forbid registering."""
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


def host_block(num_bytes: int, pins: Sequence[Pin]) -> torch.Tensor:
    """By the first that can; WSL and containers limit how much may be pinned."""
    refused: list[str] = []
    for pin in pins:
        try:
            return pin(num_bytes)
        except RuntimeError as error:
            refused.append(in_words(error))
    if refused:
        reasons = "; ".join(refused)
        log.warning("host memory cannot be pinned (%s): the base comes back to the card more slowly", reasons)
    return torch.empty(num_bytes, dtype=torch.uint8)


PINS: tuple[Pin, ...] = (registered, allocated)


class Swapped:
    """It waits in host memory; on the card when this object is made."""

    def __init__(self, policy: Policy, pins: Sequence[Pin] = ()) -> None:
        """pins: ways to pin the block, in this order."""
        self.policy, self.is_awake = policy, True
        found = {name: tensor for name, tensor in frozen_tensors(policy) if can_leave(tensor)}
        sizes = [aligned(tensor.nbytes) for tensor in found.values()]
        # Kept: it is pinned for as long as it lives.
        self.block = block = host_block(sum(sizes), pins)
        self.table: dict[str, Entry] = {}
        for start, (name, tensor) in zip(accumulate(sizes, initial=0), found.items(), strict=False):
            waiting = block[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            self.table[name] = Entry(tensor=tensor, waiting=waiting.copy_(tensor.data))
        self.rest = {name for name, _ in frozen_tensors(policy)} - self.table.keys()

    def sleep(self) -> None:
        if self.is_awake:
            for entry in self.table.values():
                entry.free()
        self.is_awake = False

    def wake(self) -> bool:
        if self.is_awake:
            return False
        for entry in self.table.values():
            entry.fill()
        if self.policy.device.type == "cuda":
            # What comes next needs it all, and so it is known how long it took.
            torch.cuda.synchronize(self.policy.device)
        self.is_awake = True
        return True

    def sums(self) -> dict[str, int]:
        if self.is_awake:
            return frozen_sums(self.policy)
        stayed = {name: word_sum(tensor) for name, tensor in frozen_tensors(self.policy) if name in self.rest}
        return stayed | {name: word_sum(entry.waiting) for name, entry in self.table.items()}


def can_leave(tensor: torch.Tensor) -> bool:
    """Whether it is large, and all of its memory is its own."""
    storage = tensor.untyped_storage()
    whole = tensor.is_contiguous() and storage.nbytes() == tensor.nbytes
    return tensor.nbytes >= SMALL and whole and storage.resizable()


class WakingLease:
    """A lease in whose turns the base is on the card."""

    def __init__(self, lease: ComputeLease, residency: Residency) -> None:
        self.lease, self.residency = lease, residency

    @contextmanager
    def hold(self, role: str, meanwhile: Callable[[], None] = nothing) -> Iterator[Turn]:
        with self.lease.hold(role, meanwhile) as turn:
            with swapping(turn):
                self.residency.wake()
            try:
                yield turn
            finally:
                with swapping(turn):
                    self.residency.sleep()


@contextmanager
def swapping(turn: Turn) -> Iterator[None]:
    """Notes how long it takes."""
    start = time.monotonic()
    yield
    turn.swap_s += time.monotonic() - start


Shared = Lender | Borrower | None
"""What a process has of a common copy."""


def residency_of(
    compute: ComputeConfig, policy: Policy, role: Literal["learner", "actor"], shared: Shared = None
) -> Residency:
    """As configured; on a CPU both processes map one copy, and nothing has to leave. A base that was to be shared and
    is not waits in host memory, which takes no more of the card."""
    if isinstance(shared, Borrower):
        return Borrowed(policy, shared)
    leaves = compute.swaps_base(role) and not shared and policy.device.type == "cuda"
    return Swapped(policy, PINS) if leaves else Resident(policy)


def lend(compute: ComputeConfig, device: torch.device, folder: Path, known: str) -> Lender | None:
    """For the learner, before it loads. folder: of the leases of the run. known: a reason against it; may be empty."""
    if not is_shared(compute, device):
        return None
    lender = Lender(folder, CudaBlocks(device), card_facts(device).uuid)
    return None if said(lender.offer(known)) else lender


def borrow(compute: ComputeConfig, device: torch.device, folder: Path, wait_s: float) -> Borrower | None:
    """For an actor, before it loads, and without the lease, which the learner needs first. wait_s: for a learner."""
    if not is_shared(compute, device):
        return None
    borrower = Borrower(folder, CudaBlocks(device), card_facts(device).uuid)
    return None if said(borrower.ask(wait_s)) else borrower


def is_shared(compute: ComputeConfig, device: torch.device) -> bool:
    return compute.residency == "shared" and device.type == "cuda" and compute.learner_card == compute.actor_card


def said(reason: str) -> bool:
    """Whether there is a reason, which is then in the log."""
    if reason:
        log.warning("the base is not shared: %s. It waits in host memory between two turns (swap)", reason)
    return bool(reason)
