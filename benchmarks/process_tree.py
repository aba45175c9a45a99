"""Runs a command and measures the memory of all its processes together."""

import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

POLL_S = 0.1
GROWN = 1.005
"""By so much, from one count to the next."""


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
    """The command, its descendants, and their memory at its largest. To count the pages of gigabytes takes dozens of
    milliseconds in which a process waits for new ones. So they are counted only when the resident sum, or its part
    that is not of files, has grown beyond the last count; these cost nothing to read."""
    start = time.monotonic()
    pss = rss = counted_rss = counted_private = 0.0
    with log.open("wb") as output:
        process = subprocess.Popen(argv, stdout=output, stderr=subprocess.STDOUT, env=environment)
        while process.poll() is None:
            tree = with_descendants(process.pid)
            resident, private = resident_mb(tree), private_mb(tree)
            if resident > GROWN * counted_rss or private > GROWN * counted_private:
                pss = max(pss, proportional_mb(tree))
                counted_rss, counted_private = max(counted_rss, resident), max(counted_private, private)
            rss = max(rss, resident)
            time.sleep(poll_s)
    return Watched(code=process.returncode, wall_s=time.monotonic() - start, pss_mb=pss, rss_mb=rss)


def with_descendants(pid: int) -> list[psutil.Process]:
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def resident_mb(tree: Sequence[psutil.Process]) -> float:
    return summed_mb(lambda process: process.memory_info().rss, tree)


def private_mb(tree: Sequence[psutil.Process]) -> float:
    """Without the pages of files."""
    return summed_mb(lambda process: process.memory_info().rss - process.memory_info().shared, tree)


def proportional_mb(tree: Sequence[psutil.Process]) -> float:
    return summed_mb(lambda process: process.memory_full_info().pss, tree)


def summed_mb(size: Callable[[psutil.Process], int], tree: Sequence[psutil.Process]) -> float:
    """Over the processes that are still there."""
    total = 0
    for process in tree:
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            total += size(process)
    return total / 2**20
