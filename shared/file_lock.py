"""flock as we use it: the kernel frees it when its holder dies, however it dies.

The lock belongs to the open file description, so each taking opens the file anew: two takers in one process exclude
each other too. The descriptor is closed on exec; a *forked* child would keep the lock alive, so children are spawned.
The holder's pid stands in the file, for people; only the kernel's lock decides. Left out on purpose: network file
systems that do not carry flock between machines.
"""

import fcntl
import os
from pathlib import Path

from shared.files import disk_errors


def open_lock(path: Path) -> int:
    """A descriptor of our own on the lock file."""
    with disk_errors(path):
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)


def try_lock(fd: int) -> bool:
    """Take the lock if it is free."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def wait_lock(fd: int) -> None:
    """Take the lock; wait for as long as it takes."""
    fcntl.flock(fd, fcntl.LOCK_EX)


def sign(fd: int) -> None:
    """Write our pid into the lock we hold."""
    os.ftruncate(fd, 0)
    os.pwrite(fd, str(os.getpid()).encode(), 0)


def signature(fd: int) -> str:
    """Who wrote their pid last, in words."""
    pid = os.pread(fd, 32, 0).decode()
    return f"process {pid}" if pid else "another process"
