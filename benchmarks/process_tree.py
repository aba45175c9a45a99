"""Runs a command and measures the memory of all its processes together."""

import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

POLL_S = 0.1


@dataclass(frozen=True, kw_only=True)
class Watched:
    """How a command went."""

    code: int
    """Exit code."""
    wall_s: float
    """From start to end."""
    pss_mb: float
    """Largest proportional sum: a page that k processes share counts 1/k in each. What the machine has to have."""
    rss_mb: float
    """Largest resident sum: a shared page counts in every process that maps it."""


def run_watched(argv: Sequence[str], log: Path, environment: dict[str, str], poll_s: float = POLL_S) -> Watched:
    """The command, its descendants, and their memory at its largest. To count the pages of gigabytes takes milliseconds
    in which a process waits for new ones, so large models are asked less often."""
    start = time.monotonic()
    pss = rss = 0.0
    with log.open("wb") as output:
        process = subprocess.Popen(argv, stdout=output, stderr=subprocess.STDOUT, env=environment)
        while process.poll() is None:
            now = memory_mb(process.pid)
            pss, rss = max(pss, now[0]), max(rss, now[1])
            time.sleep(poll_s)
    return Watched(code=process.returncode, wall_s=time.monotonic() - start, pss_mb=pss, rss_mb=rss)


def memory_mb(pid: int) -> tuple[float, float]:
    """Proportional and resident sum over the process and its descendants."""
    pss = rss = 0
    try:
        root = psutil.Process(pid)
        for process in [root, *root.children(recursive=True)]:
            memory = process.memory_full_info()
            pss, rss = pss + memory.pss, rss + memory.rss
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        pass
    return pss / 2**20, rss / 2**20
