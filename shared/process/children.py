"""The processes below one process: find them, adopt orphans, end them, and say how they ended.

    orphan   a process below ours whose own parent died; after adopt_orphans() it becomes our child
    stray    a child that we did not start: an orphan that came to us

The tree is read from /proc. Before anything is killed, the whole tree is stopped (SIGSTOP, repeated until no new
process appears), so that a process that keeps forking cannot escape.
"""

import contextlib
import ctypes
import os
import signal
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

PROC = Path("/proc")
ASKS_TO_END = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
"""Signals that may go to every process of a run at once. A process that cleans up after others must survive them."""
STRAYS_TICK_S = 0.02
STRAYS_LIMIT_S = 5.0

_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """From now on, orphans anywhere below this process become its children, in any session."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def strays(known: set[int]) -> set[int]:
    """Our children, zombies included, except the known ones."""
    return set(children()[os.getpid()]) - known


def end_strays(known: set[int], grace_s: float = 0.0) -> None:
    """Wait `grace_s` for strays to end by themselves, then kill them with their trees, and reap them.

    A process that dies may leave us its own children, so this is repeated until no stray is left, for at most
    STRAYS_LIMIT_S.
    """
    start = time.monotonic()
    while (left := strays(known)) and (passed_s := time.monotonic() - start) < STRAYS_LIMIT_S:
        if passed_s >= grace_s:
            end_trees(left)
        reap(left)
        time.sleep(STRAYS_TICK_S)


def reap_strays(known: set[int]) -> None:
    """Collect the strays that have ended, without waiting. Cheap if no child has ended."""
    with contextlib.suppress(ChildProcessError):
        if os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            reap(strays(known))


def reap(pids: Iterable[int]) -> None:
    """Collect those of our children that have ended."""
    for pid in pids:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def children() -> dict[int, list[int]]:
    """Process id -> the ids of its children, zombies included."""
    found: dict[int, list[int]] = defaultdict(list)
    for entry in PROC.glob("[0-9]*/stat"):
        # A process may end after it was listed.
        with contextlib.suppress(OSError):
            # The name in parentheses may contain anything, so start after the last one: state, then parent.
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
    """Kill these processes and all below them. Their parents still have to reap them."""
    frozen: set[int] = set()
    while new := tree(roots) - frozen:
        send(new, signal.SIGSTOP)
        frozen |= new
    send(frozen, signal.SIGKILL)


def send(pids: set[int], which: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, which)


def how_it_ended(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return f"ended with exit code {code}"
    # Real-time signals have no names.
    known = -code in set(signal.Signals)
    return f"was ended by {signal.Signals(-code).name if known else f'signal {-code}'}"


def is_stopped(pid: int) -> bool:
    """Whether the process was stopped (SIGSTOP). False if it cannot be seen: /proc may hide a process that keeps its
    memory to itself (hidepid)."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False
