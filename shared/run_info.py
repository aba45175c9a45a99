"""What a run ran on: the record in run.json, written once when the run directory is made.

Bits on CPU depend on the versions, the processor and the thread counts; the first two stand here, the threads in
config.json. Versions are read from the installed packages' metadata, without importing torch.
"""

import os
import platform
import secrets
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import msgspec

PACKAGES = ("torch", "transformers", "bitsandbytes", "pyzmq")
CPUINFO = Path("/proc/cpuinfo")


class RunInfo(msgspec.Struct, frozen=True, kw_only=True):
    """run.json."""

    run_id: str
    """32 random hex digits; actors follow it across a learner's restart."""
    created: str
    """UTC, ISO 8601."""
    python: str
    """Version of the interpreter."""
    packages: dict[str, str]
    """Version of each package whose arithmetic or wire matters."""
    platform: str
    """Operating system and architecture."""
    cpu: str
    """Name of the processor."""
    cpu_count: int
    """Logical cores of the machine."""


def gather_run_info() -> RunInfo:
    """A new run on this machine, now."""
    return RunInfo(
        run_id=secrets.token_hex(16),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        python=platform.python_version(),
        packages={name: version(name) for name in PACKAGES},
        platform=platform.platform(),
        cpu=cpu_name(),
        cpu_count=os.cpu_count() or 1,
    )


def cpu_name() -> str:
    """The marketing name where Linux tells it (x86 does, ARM does not), else the architecture."""
    lines = CPUINFO.read_text(encoding="utf-8").splitlines() if CPUINFO.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
