"""Cores, vector units and the variables that decide about them; memory; what a container, a shell or a service manager
allows of both.

A container's limit (cgroups, version 2 or 1) may be set on any level above this process, so all of them are asked; the
smallest counts.
"""

import os
import platform
import resource
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from shared.run.run_dir import CPUINFO, cpu_name

PREFIXES = ("OMP_", "KMP_", "GOMP_", "MKL_", "OPENBLAS_", "ATEN_", "ONEDNN_", "DNNL_")
MEMINFO = Path("/proc/meminfo")
CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")
NO_LIMIT = 2**60
"""Version 1 writes some number near 2^63 where there is no limit."""


@dataclass(frozen=True, kw_only=True)
class Processor:
    """What computes where there is no card."""

    name: str
    """As it calls itself."""
    architecture: str
    """`x86_64`, `aarch64`."""
    flags: frozenset[str]
    """What Linux says it can do; empty where it does not say."""
    cores: int
    """Logical cores that this process may use."""
    variables: Mapping[str, str]
    """Environment variables that thread and vector libraries read."""


def look_at_processor(cpuinfo: Path = CPUINFO) -> Processor:
    """Of this machine and process."""
    return Processor(
        name=cpu_name(),
        architecture=platform.machine(),
        flags=read_flags(cpuinfo),
        cores=len(os.sched_getaffinity(0)),
        variables={name: text for name, text in os.environ.items() if name.startswith(PREFIXES)},
    )


def read_flags(cpuinfo: Path) -> frozenset[str]:
    """Of the first core."""
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    named = [line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features"))]
    return frozenset(named[0]) if named else frozenset()


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
    wsl: bool
    """Windows Subsystem for Linux."""


def look_at_memory(meminfo: Path = MEMINFO) -> Memory:
    """Of this machine, now."""
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
    """Limits of this process; None where there is none."""

    cpus: float | None
    """Processor time, in cores."""
    memory_limit: int | None
    """Bytes that all its processes may hold."""
    memory_left: int | None
    """Bytes of it not yet held."""


def look_at_cgroup(root: Path = CGROUPS, own: Path = OWN_CGROUP) -> Cgroup:
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


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The soft ones; None for unlimited."""

    open_files: int | None
    """Descriptors of one process."""
    file_bytes: int | None
    """Size of a file that a process may write."""
    address_bytes: int | None
    """Address space of one process, used or only reserved."""
    processes: int | None
    """Processes and threads of this user."""


def look_at_limits() -> Limits:
    """Of this process."""
    return Limits(
        open_files=soft(resource.RLIMIT_NOFILE),
        file_bytes=soft(resource.RLIMIT_FSIZE),
        address_bytes=soft(resource.RLIMIT_AS),
        processes=soft(resource.RLIMIT_NPROC),
    )


def soft(which: int) -> int | None:
    """The limit in force."""
    value = resource.getrlimit(which)[0]
    return None if value == resource.RLIM_INFINITY else value
