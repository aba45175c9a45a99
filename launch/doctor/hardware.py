"""Facts about the hardware: the processor, and the limits that a shell sets. Memory and the limits of a container are
read by shared/process/free_memory.py, cards by launch/card/cards.py.
"""

import os
import platform
import resource
from collections.abc import Mapping
from dataclasses import dataclass

from shared.process.entry_point import raised_limit
from shared.process.processor import read_flags
from shared.run.run_dir import CPUINFO, cpu_name

PREFIXES = ("OMP_", "KMP_", "GOMP_", "MKL_", "OPENBLAS_", "ATEN_", "ONEDNN_", "DNNL_")


@dataclass(frozen=True, kw_only=True)
class Processor:
    """The CPU, and what this process may use of it."""

    name: str
    """Such as `AMD EPYC 7B13`."""
    architecture: str
    """`x86_64`, `aarch64`."""
    flags: frozenset[str]
    """Features that Linux lists; empty if it lists none."""
    cores: int
    """Logical cores that this process may use."""
    variables: Mapping[str, str]
    """Environment variables that the thread and vector libraries read."""


def look_at_processor() -> Processor:
    return Processor(
        name=cpu_name(),
        architecture=platform.machine(),
        flags=read_flags(CPUINFO),
        cores=len(os.sched_getaffinity(0)),
        variables={name: text for name, text in os.environ.items() if name.startswith(PREFIXES)},
    )


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Soft limits of this process (ulimit); None for unlimited."""

    open_files: int | None
    """File descriptors of one process of a run, which raises its soft limit at the start."""
    file_bytes: int | None
    """Largest file that a process may write."""
    address_bytes: int | None
    """Address space of one process, including what is only reserved."""
    processes: int | None
    """Processes and threads of this user."""


def look_at_limits() -> Limits:
    return Limits(
        open_files=open_files(),
        file_bytes=soft(resource.RLIMIT_FSIZE),
        address_bytes=soft(resource.RLIMIT_AS),
        processes=soft(resource.RLIMIT_NPROC),
    )


def open_files() -> int | None:
    now = soft(resource.RLIMIT_NOFILE)
    return None if now is None else max(now, raised_limit())


def soft(which: int) -> int | None:
    value = resource.getrlimit(which)[0]
    return None if value == resource.RLIM_INFINITY else value
