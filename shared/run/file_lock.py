"""flock, which the kernel releases when its holder dies, also after SIGKILL.

The lock belongs to the open file description. Each taker opens the file itself, so two takers in one process exclude
each other too. The descriptor is closed on exec, but a *forked* child would keep the lock, so no
process forks while it has one. The holder's pid is in the file, for people; only the kernel's lock decides.

Single bytes of the file can be locked too (fcntl's locks of an open file description, Linux only). They have the same
owner and the same end: shared/process/lease.py makes a lease with a queue of them. A file has locks of one kind only.
On a disk of this machine the two kinds know nothing of each other, but NFS and CIFS make flock a lock of all bytes.
Left out on purpose: network file systems that do not carry flock between machines.
"""

import fcntl
import os
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shared.run import disk
from shared.run.files import OUT, disk_errors

BYTE_LOCK = struct.Struct("hhqqi4x")
"""The kernel's `struct flock`: type, whence, start, length, pid."""
SET_BYTE_LOCK = getattr(fcntl, "F_OFD_SETLK", 37)
"""A Python built against a glibc before 2.20 lacks the name. The number is the same on every Linux."""
DYING_S = 1.0
"""How long the kernel may take to clean up after a killed process with much memory."""


def open_lock(path: Path, place: str = OUT) -> int:
    """A new descriptor of the lock file. Anyone who can read the file could lock it, so only the owner can."""
    with disk_errors(path, place):
        return disk.open_file(path, os.O_RDWR | os.O_CREAT, 0o600)


def try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def try_byte(fd: int, place: int) -> bool:
    """Lock the byte at this place; the file need not be so long."""
    try:
        fcntl.fcntl(fd, SET_BYTE_LOCK, BYTE_LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, place, 1, 0))
    except BlockingIOError:
        return False
    return True


def free_byte(fd: int, place: int) -> None:
    fcntl.fcntl(fd, SET_BYTE_LOCK, BYTE_LOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, place, 1, 0))


def try_lock_awhile(fd: int) -> bool:
    """Take the lock if it is free or will be soon: a killed process releases it a moment after its death."""
    deadline = time.monotonic() + DYING_S
    while not try_lock(fd):
        if time.monotonic() > deadline:
            return False
        time.sleep(DYING_S / 20)
    return True


def is_locked(path: Path) -> bool:
    """Whether a process holds the lock now. To ask is to take it for a moment, which takers wait for."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


@contextmanager
def exclusive(path: Path, place: str) -> Iterator[None]:
    """One process at a time in the block; the others wait."""
    fd = open_lock(path, place)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def sign(fd: int, path: Path) -> None:
    with disk_errors(path):
        disk.truncate(fd, 0, path)
        disk.write(fd, str(os.getpid()).encode(), path)


def signature(fd: int) -> str:
    pid = os.pread(fd, 32, 0).decode()
    return f"process {pid}" if pid else "another process"
