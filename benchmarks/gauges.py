"""What a process holds at a moment: memory, open files, threads.

`rss_mb` is all resident memory and `anon_mb` the part of it that belongs to no file. The rest is mostly the mapped
base, whose pages come when they are first read and go when the kernel needs room.
"""

from pathlib import Path

import psutil

BOUNDS = {"rss_mb": 1.0, "anon_mb": 1.0, "fds": 0.5, "threads": 0.5}
"""Growth per 1,000 steps that still counts as flat."""


def gauges(pid: int) -> dict[str, float]:
    """Of one process; empty if it has gone."""
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            memory = process.memory_info()
            return {
                "rss_mb": memory.rss / 2**20,
                "anon_mb": (memory.rss - memory.shared) / 2**20,
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
