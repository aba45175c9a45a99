"""How learner and actor come to one copy of the frozen base on their card (`compute.residency = "shared"`).

    learner, the lender                          actor, a borrower
    locks `base-lender`, writes `base-offer`
                                                 maps the offer's probe, compares its bytes
                                                 writes `base-answer`: nothing against it, or the reason
    loads the base into a block (block.py)
    writes `base-agreed`: handle, table, sums
                                                 maps the block, compares table and sums, computes with views of it

An offer is tried with a small probe before anything large is allocated, so that where memory cannot be shared (two
containers without `ipc: host`, WSL, two cards, an allocator that cannot) both processes know in time: `base-agreed` has
the reason then, and each has a copy of its own that waits in host memory (`swap`), which takes no more of the card.

The kernel frees the lender's lock when it dies. A borrower looks at the lock before and after every turn: only what was
computed while the lender lived is sent, because memory whose owner has died may hold anything. The name of an offer is
random, so nothing of an earlier start counts. The files are in the folder `lease` of the run, which its owner alone can
read and in which actors may write. Left out: more than one machine, and cards that processes share by MPS.
"""

import hashlib
import logging
import os
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import msgspec
import torch

from protocol.errors import PeerGone, PeerTimeout
from shared.base.block import Blocks, Table, sums_of, table_of, views
from shared.errors import DamageError, in_words
from shared.run.file_lock import open_lock, try_lock, try_lock_awhile
from shared.run.files import write_whole

LOCK, OFFER, ANSWER, AGREED = "base-lender", "base-offer", "base-answer", "base-agreed"
PROBE_BYTES = 2**20
ANSWER_S = 60.0
"""A lender waits for an actor's answer: as long as one may take to import its libraries."""
POLL_S = 0.05
CANNOT = (RuntimeError, OSError)
"""What PyTorch raises where a block cannot be exported or mapped."""

log = logging.getLogger("base")


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """Of a lender that has not loaded yet."""

    name: str
    """Random; of this start of the lender."""
    card: str
    """UUID."""
    probe: bytes
    """Handle of a small block."""
    sha256: bytes
    """Of what is in it."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """Of an actor that has tried."""

    offer: str
    """Its name."""
    reason: str
    """Why it cannot borrow; empty if it can."""


class Agreed(msgspec.Struct, frozen=True, kw_only=True):
    """How it is until the lender ends."""

    offer: str
    reason: str
    """Why each process has a copy of its own; empty if there is one."""
    handle: bytes = b""
    table: Table | None = None
    sums: dict[str, int] = {}


Message = TypeVar("Message", Offer, Answer, Agreed)


def read(folder: Path, name: str, kind: type[Message]) -> Message | None:
    file = folder / name
    return msgspec.msgpack.decode(file.read_bytes(), type=kind) if file.is_file() else None


def write(folder: Path, name: str, message: Offer | Answer | Agreed) -> None:
    write_whole(folder / name, msgspec.msgpack.encode(message), durable=False)


def sha256(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()


class Lender:
    """The process that allocates the block and outlives the others."""

    def __init__(self, folder: Path, blocks: Blocks, card: str) -> None:
        """card: UUID."""
        self.folder, self.blocks, self.card = folder, blocks, card
        self.name = secrets.token_hex(16)
        self.block: torch.Tensor | None = None
        # First, since what a living lender has written counts.
        for file in (OFFER, ANSWER, AGREED):
            (folder / file).unlink(missing_ok=True)
        self.lock = open_lock(folder / LOCK)
        if not try_lock_awhile(self.lock):
            raise RuntimeError(f"another process lends the base of {folder.parent}")

    def offer(self, known: str = "", wait_s: float = ANSWER_S) -> str:
        """Why nobody can borrow; empty if an actor can. Whatever it is, everybody is told. known: a reason that needs
        no trial."""
        reason = known or self.tried(wait_s)
        if reason:
            write(self.folder, AGREED, Agreed(offer=self.name, reason=reason))
        return reason

    def tried(self, wait_s: float) -> str:
        content = secrets.token_bytes(PROBE_BYTES)
        try:
            probe = self.blocks.make(PROBE_BYTES)
            probe.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
            handle = self.blocks.handle(probe)
        except CANNOT as error:
            return f"its memory cannot be shared ({in_words(error)})"
        write(self.folder, OFFER, Offer(name=self.name, card=self.card, probe=handle, sha256=sha256(content)))
        deadline = time.monotonic() + wait_s
        while time.monotonic() < deadline:
            answer = read(self.folder, ANSWER, Answer)
            if answer and answer.offer == self.name:
                return answer.reason
            time.sleep(POLL_S)
        return f"no actor has answered within {wait_s:.0f} s"

    def place(self, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """tensors: of the base's file. Those of the block are views of it, and from now on others may map it."""
        table = table_of(tensors, dtype)
        self.block = self.blocks.make(table.size)
        parts = views(self.block, table)
        for name, part in parts.items():
            part.copy_(tensors[name])
        handle = self.blocks.handle(self.block)
        write(self.folder, AGREED, Agreed(offer=self.name, reason="", handle=handle, table=table, sums=sums_of(parts)))
        log.info("both processes share one copy of the base, %d MiB", table.size // 2**20)
        return {**tensors, **parts}


class Borrower:
    """A process that computes with another's block."""

    def __init__(self, folder: Path, blocks: Blocks, card: str) -> None:
        """card: UUID."""
        self.folder, self.blocks, self.card = folder, blocks, card
        self.agreed: Agreed | None = None

    def ask(self, wait_s: float) -> str:
        """Try what is offered, and wait until it is agreed: for a lender at most this long, for a lender that lives as
        long as it loads. Returns why there is no common copy; empty if there is."""
        deadline, tried = time.monotonic() + wait_s, ""
        while True:
            if not self.has_lender():
                if time.monotonic() >= deadline:
                    raise PeerTimeout("The learner", "its copy of the base", wait_s)
            elif agreed := read(self.folder, AGREED, Agreed):
                self.agreed = agreed
                return agreed.reason
            elif (offer := read(self.folder, OFFER, Offer)) and offer.name != tried:
                tried = offer.name
                write(self.folder, ANSWER, Answer(offer=tried, reason=self.against(offer)))
            time.sleep(POLL_S)

    def against(self, offer: Offer) -> str:
        if offer.card != self.card:
            return f"the actor computes on another card ({self.card}) than the learner ({offer.card})"
        try:
            found = self.blocks.open(offer.probe).cpu().numpy().tobytes()
        except CANNOT as error:
            return f"the actor cannot map the learner's memory ({in_words(error)})"
        return "" if sha256(found) == offer.sha256 else "the actor does not see what the learner has written"

    def place(self, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """tensors: of the base's file. Those of the block are views of the lender's."""
        assert self.agreed is not None
        self.check()
        table = table_of(tensors, dtype)
        if self.agreed.table != table:
            raise DamageError(
                "The learner's copy of the base has another layout than this actor's file; use the same"
                " versions and the same cache folder (model.cache_dir) for both."
            )
        parts = views(self.blocks.open(self.agreed.handle), table)
        found = sums_of(parts)
        if wrong := [name for name, total in self.agreed.sums.items() if found[name] != total]:
            raise DamageError(
                f"The learner's copy of the base reads differently here: '{wrong[0]}' is not what was written; use"
                " compute.residency=swap."
            )
        return {**tensors, **parts}

    def has_lender(self) -> bool:
        fd = open_lock(self.folder / LOCK)
        try:
            return not try_lock(fd)
        finally:
            os.close(fd)

    def check(self) -> None:
        """PeerGone if the lender has died, or another has taken its place."""
        now = read(self.folder, AGREED, Agreed) if self.has_lender() else None
        if now is None or self.agreed is None or now.offer != self.agreed.offer:
            raise PeerGone("The learner, whose copy of the base this actor computes with, has ended.")
