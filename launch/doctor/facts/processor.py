"""Cores and vector units, and the environment variables that decide about them."""

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shared.run_info import CPUINFO, cpu_name

PREFIXES = ("OMP_", "KMP_", "GOMP_", "MKL_", "OPENBLAS_", "ATEN_", "ONEDNN_", "DNNL_")


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
