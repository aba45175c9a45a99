"""Free memory: of this machine and the container, and in the heap of this process, which gives it back.

A container's limit (cgroups, version 2 or 1) may be set on any level above this process, so every level is read; the
smallest limit counts. On a system without these files nothing is known, and nothing is refused.

glibc keeps freed memory in its heap, for what the process allocates next:

    memory_returned       after a turn, if it was long or WORTH_RETURNING is free: the other processes compute next,
                          and together all would need what each needs at its peak
    return_freed_memory   at once: within a turn, where what follows needs less than what came before
    Trimmer.after_part    after a part of a computation (a micro-batch of learner/update/forward_pass.py), if later
                          parts have made the process larger by MOST_GROWTH. Parts differ in size, so what one of them
                          leaves is often a little too small for the next

All cost time, since the next allocation gets its pages anew: a gigabyte takes a tenth of a second.
"""

import ctypes
import os
import platform
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from threading import Timer

from shared.process.processor import CGROUPS, OWN_CGROUP, container_cores, group_paths, levels, number

MEMINFO = Path("/proc/meminfo")
STATM = Path("/proc/self/statm")
WORTH_RETURNING = 96 * 2**20
"""Bytes. Less is not worth the time in the step of a small model."""
LONG_TURN_S = 1.0
"""After a turn this long, any amount is returned: to return 96 MiB takes a hundredth of a second."""
SOON_S = 0.02
"""Between the end of a turn and the return of its memory: a message is handed to its socket in less."""
MOST_GROWTH = 16 * 2**20
"""Bytes by which parts may make a process larger than the first of them left it."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """The machine's memory, in bytes."""

    total: int
    """All of it."""
    available: int
    """What new processes can use without swapping, by Linux's estimate."""
    swap_total: int
    """Swap space, used or not."""
    swap_free: int
    """Swap space that is not used."""
    wsl: bool
    """Whether this is the Windows Subsystem for Linux."""


def look_at_memory(meminfo: Path = MEMINFO) -> Memory:
    rows = (line.split() for line in meminfo.read_text(encoding="utf-8").splitlines())
    kib = {row[0].rstrip(":"): int(row[1]) for row in rows}
    return Memory(
        total=kib["MemTotal"] * 1024,
        available=kib["MemAvailable"] * 1024,
        swap_total=kib["SwapTotal"] * 1024,
        swap_free=kib["SwapFree"] * 1024,
        wsl="microsoft" in platform.release().lower(),
    )


@dataclass(frozen=True, kw_only=True)
class Cgroup:
    """Limits of the container; None if there is no limit."""

    cpus: float | None
    """Processor time, in cores."""
    memory_limit: int | None
    """Bytes that all its processes may use together."""
    memory_left: int | None
    """Bytes of it that are not used yet."""


def look_at_cgroup(root: Path = CGROUPS, own: Path = OWN_CGROUP) -> Cgroup:
    paths = group_paths(own)
    memory = [*levels(root, paths.get("", "/")), *levels(root / "memory", paths.get("memory", "/"))]
    limits = [
        (limit - used + reclaimable(folder), limit)
        for folder in memory
        if (limit := number(folder, "memory.max", "memory.limit_in_bytes")) is not None
        and (used := number(folder, "memory.current", "memory.usage_in_bytes")) is not None
    ]
    left, limit = min(limits, default=(None, None))
    return Cgroup(cpus=container_cores(root, own), memory_limit=limit, memory_left=left)


def reclaimable(folder: Path) -> int:
    """Bytes of cached files, which count as used and are given up when memory is short."""
    stat = folder / "memory.stat"
    rows = [line.split() for line in stat.read_text().splitlines()] if stat.is_file() else []
    found = {row[0]: int(row[1]) for row in rows if len(row) == 2}
    prefix = "total_" if "total_inactive_file" in found else ""
    return sum(found.get(f"{prefix}{name}_file", 0) for name in ("inactive", "active"))


def free_memory() -> int | None:
    """Bytes that a run may use; None if the system does not say."""
    try:
        found = (look_at_memory().available, look_at_cgroup().memory_left)
    except (OSError, KeyError, ValueError):
        return None
    return min(amount for amount in found if amount is not None)


def peak_memory_mb() -> float:
    """Largest resident size of this process so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


class HeapSizes(ctypes.Structure):
    """glibc's `struct mallinfo2`: ten sizes, of which number FREE is that of freed memory in the heap."""

    _fields_ = (("sizes", ctypes.c_size_t * 10),)


FREE = 8


@contextmanager
def memory_returned() -> Iterator[None]:
    """Soon after the block, a thread of its own returns what is free, unless the block was short and that is little.
    Meanwhile the result of the block can be sent."""
    begun = time.monotonic()
    try:
        yield
    finally:
        worth = 0 if time.monotonic() - begun >= LONG_TURN_S else WORTH_RETURNING
        timer = Timer(SOON_S, return_freed_memory, [worth])
        timer.daemon = True
        timer.start()


def return_freed_memory(worth: int = 0) -> None:
    """Return what is free in the heap; with `worth`, only if it is more bytes than that. glibc also counts what it has
    returned already, and before 2.33 it does not say how much is free."""
    sizes = getattr(libc(), "mallinfo2", None)
    if not worth or not sizes or sizes().sizes[FREE] > worth:
        libc().malloc_trim(0)


@cache
def libc() -> ctypes.CDLL:
    """Opened once: each time leaves a circle of references, which waits for the garbage collector."""
    found = ctypes.CDLL(None)
    if sizes := getattr(found, "mallinfo2", None):
        sizes.restype = HeapSizes
    return found


class Trimmer:
    """Returns what the parts of a computation leave, of which the first is about the largest."""

    def __init__(self) -> None:
        self.allowed: int | None = None
        """Resident bytes that the next part may leave: as many as the first one, and what has stayed since."""

    def after_part(self) -> None:
        """Call it when a part has freed what it needed."""
        if self.allowed is None:
            self.allowed = own_bytes()
        elif own_bytes() > self.allowed + MOST_GROWTH:
            return_freed_memory()
            self.allowed = max(self.allowed, own_bytes())


def own_bytes() -> int:
    """Resident memory without mapped files. Pages that a fork has in common with the process that forked it count."""
    _, resident, shared, *_ = (int(pages) for pages in STATM.read_text().split())
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")
