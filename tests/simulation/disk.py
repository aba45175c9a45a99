"""A disk that forgets: the real journal on a file system in memory, and what is left of it after a kill or a power cut.

    kill        what was written stays, except the write that was interrupted
    power cut   of what no fsync covered, a random part stays, perhaps with zeros in it

Checkpoints appear whole or not at all, as `write_tree_whole` guarantees and its own tests check.
"""

import random
import re
from collections.abc import Callable, Collection
from pathlib import Path

from learner.durable.checkpoint import Checkpoint, UnsavedCheckpoint
from learner.durable.journal import Journal, segment_path
from learner.durable.journal_format import SECTOR_BYTES
from learner.durable.recorder import size_from, voided_from, voided_orders
from learner.orders.orders import step_of
from shared.run.run_dir import RunDir
from tests.simulation.schedule import Death

SEGMENT_BYTES = 3000
"""A few records, so that segments are begun and given up in every run."""
ORDER_ID = re.compile(rb"train/\d{6}/u\d{4}")


class Disk:
    """The run directory of one simulated run."""

    def __init__(self, folder: Path, rng: random.Random) -> None:
        self.run = RunDir(folder)
        self.rng = rng
        self.covered: dict[Path, int] = {}
        self.torn: tuple[Path, int] | None = None
        self.checkpoints: dict[int, Checkpoint] = {}

    def cover(self, *paths: Path) -> None:
        """An fsync has returned: all there is in these stays."""
        self.covered |= {path: path.stat().st_size for path in paths}

    def segments(self) -> list[Path]:
        """Of the journal."""
        return sorted(self.run.journal.glob("[0-9]*.log"))

    def cut_short(self, path: Path, start: int) -> None:
        """The process died within the write that began here."""
        self.torn = (path, start)

    def die(self, death: Death) -> None:
        """What is left."""
        if self.torn:
            path, start = self.torn
            resize(path, self.rng.randrange(start, path.stat().st_size))
            self.torn = None
        if death == "power cut":
            grown = [path for path in (*self.segments(), self.run.metrics) if path.exists()]
            for path in grown:
                self.forget(path, self.covered.get(path, 0))
            self.cover(*grown)

    def forget(self, path: Path, covered: int) -> None:
        """Of the bytes that no fsync covered."""
        size = path.stat().st_size
        if size <= covered:
            return
        if self.rng.random() < 0.75:
            resize(path, self.rng.randint(covered, size))
        else:
            sector = self.rng.randint(covered, size) // SECTOR_BYTES * SECTOR_BYTES
            zeros_from = max(covered, sector)
            path.write_bytes(path.read_bytes()[:zeros_from] + bytes(size - zeros_from))


class MemoryCheckpoints:
    """The checkpoint store's contract in memory: the newest `keep`, and the one that is to stay besides."""

    def __init__(self, disk: Disk, keep: int, point: Callable[[str], None]) -> None:
        self.disk = disk
        self.keep = keep
        self.point = point

    def save(self, unsaved: UnsavedCheckpoint, *, keep_also: Collection[int] = ()) -> None:
        """Durable at once."""
        self.point("before a checkpoint")
        kept = self.disk.checkpoints
        kept[unsaved.step] = unsaved.copied()
        for step in sorted(step for step in kept if step <= unsaved.step)[: -self.keep]:
            if step not in keep_also:
                del kept[step]
        self.point("after a checkpoint")

    def load_latest(self) -> Checkpoint | None:
        """The newest."""
        return self.disk.checkpoints[max(self.disk.checkpoints)] if self.disk.checkpoints else None

    def oldest_kept(self, saved: int) -> int:
        """As the real one."""
        steps = sorted(step for step in self.disk.checkpoints if step <= saved)
        return steps[-self.keep] if len(steps) >= self.keep else 0


def resize(path: Path, size: int) -> None:
    """Keep the first bytes."""
    path.write_bytes(path.read_bytes()[:size])


def orders_of(payload: bytes) -> list[str]:
    """The orders that a record fills, without decoding it; empty for the size of a step."""
    found = ORDER_ID.findall(payload)
    assert found or size_from(payload)
    return [order_id.decode() for order_id in found]


def recorded_in(journal: Journal) -> list[str]:
    """Orders in the order of their records, without those that were voided."""
    found: list[str] = []
    for payload in journal.reading().records():
        if (voided := voided_from(payload)) is not None:
            found = [order_id for order_id in found if step_of(order_id) < voided]
        elif cancelled := voided_orders(payload):
            found = [order_id for order_id in found if order_id not in cancelled]
        else:
            found += orders_of(payload)
    return found


def tail_of(journal: Journal, folder: Path) -> Path:
    """The segment that is being written."""
    return segment_path(folder, journal.tail)
