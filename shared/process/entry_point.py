"""The edge of a process: where errors become an exit code.

    0  done      2  something a user can mend      1  a peer that fell silent (an actor is started again), a crash

One sentence on stderr for what a user can mend and for silence, a traceback for a crash alone.

Also where logging is set up, the process is tied to its parent's life, its memory is closed to others, and the limit of
its descriptors is raised: the default of most systems, 1024, is meant for programs that use `select`.
"""

import ctypes
import logging
import resource
import sys
from collections.abc import Callable
from contextlib import suppress

from protocol.errors import HandshakeRefused, PeerTimeout, SecurityError, VersionMismatch
from shared.errors import UserError
from shared.process.parent_death import die_with_parent

_PR_SET_DUMPABLE = 4
MAX_DESCRIPTORS = 8192
MIN_DESCRIPTORS = 40
"""With fewer a learner cannot hold its files and one actor; what fails then looks like anything but the limit."""


def run_process(name: str, body: Callable[[], None]) -> int:
    """Run a process's body; returns its exit code."""
    die_with_parent()
    keep_to_itself()
    form = f"%(asctime)s %(levelname)s {name} %(message)s"
    logging.basicConfig(level=logging.INFO, format=form, stream=sys.stderr)
    logging.getLogger(name).info("loads libraries and model")
    try:
        raise_descriptors()
        body()
    except (UserError, SecurityError, HandshakeRefused, VersionMismatch) as error:
        say(error)
        return 2
    except PeerTimeout as error:
        say(error)
        return 1
    return 0


def keep_to_itself() -> None:
    """Close environment, memory and descriptors to the user's other processes (Linux): a reward function runs in one of
    them, and tokens are in our environment. Only root may read /proc/PID/environ then, or attach a debugger. A program
    that is started begins open again. No boundary: the files and the rights of both are still those of one user."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def raise_descriptors() -> None:
    """The soft limit, as far as the hard one and MAX_DESCRIPTORS allow; one that is higher stays."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    if wanted < MIN_DESCRIPTORS:
        raise UserError(
            f"A process may open {wanted} files and connections here, and needs {MIN_DESCRIPTORS} at least; "
            "raise the limit with `ulimit -n 1024`."
        )


def say(error: Exception) -> None:
    """A disk that is full has no room for the sentence either; the exit code is what must get through."""
    with suppress(OSError):
        print(f"error: {error}", file=sys.stderr)
