"""Run a command and watch the memory of all its processes together."""

import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

POLL_S = 0.1


def run_watched(argv: Sequence[str], log: Path, environment: dict[str, str]) -> tuple[int, float, float]:
    """Exit code, wall seconds, and the largest sum of resident memory (MiB) over the process and its descendants."""
    start = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(argv, stdout=output, stderr=subprocess.STDOUT, env=environment)
        peak = 0.0
        while process.poll() is None:
            peak = max(peak, resident_mb(process.pid))
            time.sleep(POLL_S)
    return process.returncode, time.monotonic() - start, peak


def resident_mb(pid: int) -> float:
    """Shared pages count in every process that maps them, so the sum errs against whoever has more processes."""
    total = 0
    try:
        root = psutil.Process(pid)
        for process in [root, *root.children(recursive=True)]:
            total += process.memory_info().rss
    except psutil.NoSuchProcess:
        pass
    return total / 2**20
