"""What a process holds at a moment: memory, open files, threads."""

from pathlib import Path

import psutil

BOUNDS = {"rss_mb": 1.0, "fds": 0.5, "threads": 0.5}
"""Growth per 1,000 steps that still counts as flat."""


def gauges(pid: int) -> dict[str, float]:
    """Of one process; empty if it has gone."""
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            return {
                "rss_mb": process.memory_info().rss / 2**20,
                "fds": process.num_fds(),
                "threads": process.num_threads(),
            }
    except psutil.NoSuchProcess:
        return {}


def descendants(pid: int) -> list[psutil.Process]:
    """All below a process."""
    return psutil.Process(pid).children(recursive=True)


def is_zombie(process: psutil.Process) -> bool:
    """Ended, and not collected by its parent."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def folder_mb(folder: Path) -> float:
    """Bytes of the files below; one that is deleted meanwhile counts nothing."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:
            continue
    return total / 2**20
