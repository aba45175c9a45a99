"""Memory that this machine and the container have free, the most that this process has used, and the container's
share of processor time.

A container's limit (cgroups, version 2 or 1) may be set on any level above this process, so every level is read; the
smallest limit counts. On a system without these files nothing is known, and nothing is refused.
"""

import platform
import resource
from dataclasses import dataclass
from pathlib import Path

from shared.process.processor import CGROUPS, OWN_CGROUP, container_cores, group_paths, levels, number

MEMINFO = Path("/proc/meminfo")


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
