"""What a container (or a systemd slice) allows: processor time and memory, from version 2 or version 1 of cgroups.

A limit may stand on any level above this process, so all of them are asked; the smallest counts.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")
NO_LIMIT = 2**60
"""Version 1 writes some number near 2^63 where there is no limit."""


@dataclass(frozen=True, kw_only=True)
class Cgroup:
    """Limits of this process; None where there is none."""

    cpus: float | None
    """Processor time, in cores."""
    memory_limit: int | None
    """Bytes that all its processes may hold."""
    memory_left: int | None
    """Bytes of it not yet held."""


def look_at_cgroup(root: Path = ROOT, own: Path = OWN) -> Cgroup:
    """The limits in force."""
    lines = own.read_text(encoding="utf-8").splitlines() if own.exists() else []
    paths = {name: path for _, names, path in (line.split(":", 2) for line in lines) for name in names.split(",")}
    cpu = [*levels(root, paths.get("", "/")), *levels(root / "cpu", paths.get("cpu", "/"))]
    memory = [*levels(root, paths.get("", "/")), *levels(root / "memory", paths.get("memory", "/"))]
    shares = [share for folder in cpu if (share := cpu_share(folder)) is not None]
    limits = [
        (limit - used, limit)
        for folder in memory
        if (limit := number(folder, "memory.max", "memory.limit_in_bytes")) is not None
        and (used := number(folder, "memory.current", "memory.usage_in_bytes")) is not None
    ]
    left, limit = min(limits, default=(None, None))
    return Cgroup(cpus=min(shares, default=None), memory_limit=limit, memory_left=left)


def levels(root: Path, path: str) -> Iterable[Path]:
    """The group's folder and those above it. Inside a container the path may name folders only the host has."""
    folder = root / path.lstrip("/")
    return [level for level in (folder, *folder.parents) if level.is_relative_to(root) and level.is_dir()]


def cpu_share(folder: Path) -> float | None:
    """Cores' worth of time."""
    both = folder / "cpu.max"
    if both.is_file():
        quota, period = both.read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    old = number(folder, "cpu.cfs_quota_us"), number(folder, "cpu.cfs_period_us")
    return old[0] / old[1] if old[0] is not None and old[1] else None


def number(folder: Path, *names: str) -> int | None:
    """The first of these files that is there; None for `max`, -1 and the like."""
    texts = [(folder / name).read_text().strip() for name in names if (folder / name).is_file()]
    value = int(texts[0]) if texts and texts[0].isdecimal() else NO_LIMIT
    return value if value < NO_LIMIT else None
