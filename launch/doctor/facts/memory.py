"""Memory, swap, shared memory, and whether Windows is underneath."""

import os
import platform
from dataclasses import dataclass
from pathlib import Path

MEMINFO = Path("/proc/meminfo")
SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, kw_only=True)
class Memory:
    """In bytes."""

    total: int
    """Of the machine."""
    available: int
    """What new processes may take without swapping, as Linux estimates it."""
    swap_total: int
    """Swap, used or not."""
    swap_free: int
    """Swap that is left."""
    shared_total: int | None
    """Size of /dev/shm; None if there is none."""
    shared_writable: bool
    """Whether this user may write there."""
    wsl: bool
    """Windows Subsystem for Linux."""


def look_at_memory(meminfo: Path = MEMINFO, shared: Path = SHARED_MEMORY) -> Memory:
    """Of this machine, now."""
    rows = (line.split() for line in meminfo.read_text(encoding="utf-8").splitlines())
    kib = {row[0].rstrip(":"): int(row[1]) for row in rows}
    disk = os.statvfs(shared) if shared.is_dir() else None
    return Memory(
        total=kib["MemTotal"] * 1024,
        available=kib["MemAvailable"] * 1024,
        swap_total=kib["SwapTotal"] * 1024,
        swap_free=kib["SwapFree"] * 1024,
        shared_total=disk.f_blocks * disk.f_frsize if disk else None,
        shared_writable=os.access(shared, os.W_OK),
        wsl="microsoft" in platform.release().lower(),
    )
