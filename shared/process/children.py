"""The processes below one process: orphans, strays, their end, and the words for it.

    orphan   a process below ours whose own parent died; after adopt_orphans() it becomes our child (Linux)
    stray    a child that we did not start, which is an orphan that came to us

The tree is read from /proc. It is frozen first (SIGSTOP, again and again until nobody new appears) and killed then, so
that a process that keeps forking cannot outrun its end. Left out on purpose: systems without /proc, where only the
root itself is ended.
"""

import contextlib
import ctypes
import os
import signal
import sys
from collections import defaultdict
from pathlib import Path

PROC = Path("/proc")
ASKS_TO_END = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
"""Signals that may go to every process of a run at once; a process that clears up after others must survive them."""

_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Whatever is below this process and loses its parent becomes this process's child, whatever its session."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def strays(known: set[int]) -> set[int]:
    """Our children but for those we started."""
    return set(children()[os.getpid()]) - known


def children() -> dict[int, list[int]]:
    """Process id -> the ids of its children, zombies included."""
    found: dict[int, list[int]] = defaultdict(list)
    for entry in PROC.glob("[0-9]*/stat"):
        # A process may end between the listing and the look.
        with contextlib.suppress(OSError):
            # The name in parentheses may hold anything; state and parent follow its last one.
            parent = int(entry.read_text(errors="replace").rpartition(")")[2].split()[1])
            found[parent].append(int(entry.parent.name))
    return found


def tree(roots: set[int]) -> set[int]:
    """These processes and all below them."""
    found: set[int] = set()
    below, waiting = children(), set(roots)
    while waiting:
        pid = waiting.pop()
        found.add(pid)
        waiting |= set(below[pid]) - found
    return found


def end_trees(roots: set[int]) -> None:
    """Kill these processes and all below them; whoever is their parent still has to collect them."""
    frozen: set[int] = set()
    while new := tree(roots) - frozen:
        send(new, signal.SIGSTOP)
        frozen |= new
    send(frozen, signal.SIGKILL)


def send(pids: set[int], which: signal.Signals) -> None:
    """A signal to each of them that is still there."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, which)


def how_it_ended(code: int) -> str:
    """An exit code in words."""
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def is_stopped(pid: int) -> bool:
    """As the kernel shows it on Linux; elsewhere as a parent is told about its child."""
    if sys.platform == "linux":
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
        return False
    with contextlib.suppress(ChildProcessError):
        return os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
    return False
