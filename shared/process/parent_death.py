"""Ties a child process to its parent: when the parent dies for any reason, the child is killed.

    parent:  starts the child with TANDEM_PARENT_PID=<own process id> in its environment
    child:   calls die_with_parent() before anything else in main

The kernel sends SIGKILL to the child (PR_SET_PDEATHSIG). It does so when the *thread* that started the child ends, so
children must be started from a thread that lives as long as the process. A process started manually has no such
variable and is not tied to anything.
Each generation ties its own children to itself. What a user's code starts is not tied; shared/process/children.py ends
it.
"""

import ctypes
import os
import signal

PARENT_PID = "TANDEM_PARENT_PID"

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Tie this process to the parent named in the environment, if there is one."""
    # Removed from the environment: what this process starts is not a child of that parent.
    named = os.environ.pop(PARENT_PID, None)
    if named is None:
        return
    parent_pid = int(named)
    ask_kernel(signal.SIGKILL)
    # If the parent died before the kernel was asked, no signal ever comes.
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)


def ask_kernel(number: int) -> None:
    """Get this signal when the parent dies; 0 for none. OSError if the kernel refuses."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")


def outlive_parent() -> None:
    """Undo die_with_parent, for a process that cleans up after its parent's end. It must notice that itself."""
    ask_kernel(0)
