"""What a scoring worker may use, as resource limits of its process; whatever it starts inherits them.

    memory      RLIMIT_DATA: the private memory it had when the verifier was loaded, plus verifier.memory_mb.
                RLIMIT_AS: its address space at that time, plus four times as much: shared mappings, thread stacks
    files       RLIMIT_FSIZE: one file holds at most verifier.memory_mb; memory file systems count as files
    processor   RLIMIT_CPU: for each call verifier.limit_s on every core, and two seconds
    core dumps  none

RLIMIT_DATA and not RLIMIT_AS is the limit proper, because libraries reserve address space that they never use. Each
process has these limits for itself: a worker that forks gets as much again for each child. Left out on purpose: control
groups, which need rights that an ordinary user rarely has.
"""

import math
import os
import resource
import time

MIB = 1 << 20
ADDRESS_SPACE_FACTOR = 4
SPARE_CPU_S = 2


def forbid_core_dumps() -> None:
    """A crash leaves no file."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def limit_memory(memory_mb: int) -> None:
    """From here on at most so much more than is in use now; 0 sets no limit."""
    if not memory_mb:
        return
    more = memory_mb * MIB
    lower(resource.RLIMIT_DATA, mapped_bytes("VmData") + more)
    lower(resource.RLIMIT_AS, mapped_bytes("VmSize") + ADDRESS_SPACE_FACTOR * more)
    lower(resource.RLIMIT_FSIZE, more)


def limit_cpu(limit_s: float) -> None:
    """For the call that begins now; the hard limit stays, so that the next call gets its own."""
    allowed = math.ceil(time.process_time() + limit_s * (os.cpu_count() or 1)) + SPARE_CPU_S
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (allowed if hard == resource.RLIM_INFINITY else min(allowed, hard), hard))


def lower(which: int, limit: int) -> None:
    """Soft and hard limit, never above what there is already."""
    _, hard = resource.getrlimit(which)
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(which, (limit, limit))


def mapped_bytes(name: str) -> int:
    """One line of this process's memory figures."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as status:
        line = next(line for line in status if line.startswith(name + ":"))
    return int(line.split()[1]) * 1024
