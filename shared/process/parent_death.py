"""A child process that cannot outlive its parent, however the parent ends.

    parent:  starts the child with TANDEM_PARENT_PID=<own process id> in its environment
    child:   calls die_with_parent() first thing in main

On Linux the kernel sends SIGKILL to the child (PR_SET_PDEATHSIG). It does so when the *thread* that started the child
ends, so children are started from a thread that lives as long as the process. Elsewhere a daemon thread looks twice a
second whether the parent is still there. A process started by hand has no such variable and is tied to nothing.
Each generation ties its own children to itself. What a user's code starts is tied to nobody; shared/process/children.py
ends that.
"""

import ctypes
import os
import signal
import sys
import threading
import time

PARENT_PID = "TANDEM_PARENT_PID"
LOOK_EVERY_S = 0.5

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Tie this process's life to the one named in the environment."""
    # Taken out, not read: what this process starts is not that parent's child.
    named = os.environ.pop(PARENT_PID, None)
    if named is None:
        return
    parent_pid = int(named)
    if not ask_kernel():
        threading.Thread(target=watch, args=(parent_pid,), daemon=True, name="lifeline").start()
    # The parent may have died before the kernel was asked; then no signal ever comes.
    if os.getppid() != parent_pid:
        end_now()


def ask_kernel() -> bool:
    """Whether the kernel took the request to kill this process when its parent dies."""
    if sys.platform != "linux":
        return False
    return ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) == 0


def outlive_parent() -> None:
    """Take the request to the kernel back (Linux): a process that clears up after others must see its parent's end."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 0, 0, 0, 0)


def watch(parent_pid: int) -> None:
    """An orphan gets another parent: wait for that, then end."""
    while os.getppid() == parent_pid:
        time.sleep(LOOK_EVERY_S)
    end_now()


def end_now() -> None:
    """As the kernel would have done it."""
    os.kill(os.getpid(), signal.SIGKILL)
