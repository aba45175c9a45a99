"""Freed memory goes back to the system. glibc keeps it in its heap, for what the process allocates next.

    returning      after a turn: the other processes compute next, and together all would need what each needs at its
                   peak. Also without a lease: with `pipeline.max_lag = 0` one process waits for the other
    Parts.ended    after a part of a computation, if parts after the first have made the process larger. Parts differ in
                   size, so what one of them leaves is often a little too small for the next

Both cost time, since the next allocation gets its pages anew: a gigabyte takes a tenth of a second.
"""

import ctypes
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Timer

WORTH_RETURNING = 96 * 2**20
"""Bytes. Less is not worth the time in the step of a small model."""
LONG_TURN_S = 1.0
"""After a turn this long, less is returned as well: it takes a hundredth of it."""
SOON_S = 0.02
"""Between the end of a turn and the return of its memory: a message is handed to its socket in less."""
MOST_GROWTH = 16 * 2**20
"""Bytes by which parts may make a process larger than the first of them left it."""
STATM = Path("/proc/self/statm")


class HeapSizes(ctypes.Structure):
    """glibc's `struct mallinfo2`: ten sizes, of which number FREE is that of freed memory in the heap."""

    _fields_ = (("sizes", ctypes.c_size_t * 10),)


FREE = 8


@contextmanager
def returning() -> Iterator[None]:
    """What is freed in the block goes back soon after it, in a thread of its own: the result can be sent meanwhile."""
    begun = time.monotonic()
    try:
        yield
    finally:
        worth = 0 if time.monotonic() - begun >= LONG_TURN_S else WORTH_RETURNING
        timer = Timer(SOON_S, return_freed_memory, [worth])
        timer.daemon = True
        timer.start()


def return_freed_memory(worth: int = 0) -> None:
    """To the system, if it is more than this many bytes."""
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = HeapSizes
    if libc.mallinfo2().sizes[FREE] > worth:
        libc.malloc_trim(0)


class Parts:
    """The parts of one computation, the largest first."""

    def __init__(self) -> None:
        self.after_first: int | None = None
        """Bytes of memory that only this process had then."""

    def ended(self) -> None:
        """One of them has freed what it needed."""
        own = own_bytes()
        if self.after_first is None:
            self.after_first = own
        elif own > self.after_first + MOST_GROWTH:
            return_freed_memory()


def own_bytes() -> int:
    """Resident memory that belongs to this process alone, without mapped files."""
    _, resident, shared, *_ = (int(pages) for pages in STATM.read_text().split())
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")
