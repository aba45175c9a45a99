"""The entry point of a process: sets the process up, runs its body, and turns errors into an exit code.

    0  done
    1  a peer fell silent or ended (an actor is then started again), or a crash
    2  an error that the user can fix
    3  another rank of the learner ended; its log has the reason

stderr gets one sentence for a user error and for a silent peer, and a traceback only for a crash.

The setup configures logging, ties the process to its parent, closes its memory to other processes, and raises the limit
of open descriptors: the default of most systems, 1024, is meant for programs that use `select`.
"""

import ctypes
import logging
import resource
import sys
from collections.abc import Callable
from contextlib import suppress

from protocol.errors import AddressError, HandshakeRefused, PeerGone, PeerTimeout, SecurityError, WrongVersion
from shared.errors import RankLost, UserError
from shared.process.parent_death import die_with_parent
from shared.process.supported_system import refuse_other_systems

_PR_SET_DUMPABLE = 4
LOST_RANK = 3
MAX_DESCRIPTORS = 8192
MIN_DESCRIPTORS = 40
"""Fewer are not enough for a learner's files and one actor, and the errors that follow would not name the limit."""


def run_process(name: str, body: Callable[[], None]) -> int:
    die_with_parent()
    keep_to_itself()
    form = f"%(asctime)s %(levelname)s {name} %(message)s"
    logging.basicConfig(level=logging.INFO, format=form, stream=sys.stderr)
    logging.getLogger(name).info("loads libraries and model")
    try:
        refuse_other_systems(sys.platform)
        raise_descriptors()
        body()
    except (UserError, SecurityError, AddressError, HandshakeRefused, WrongVersion) as error:
        say(error)
        return 2
    except (PeerTimeout, PeerGone) as error:
        say(error)
        return 1
    except RankLost as error:
        say(error)
        return LOST_RANK
    return 0


def keep_to_itself() -> None:
    """Close environment, memory and descriptors to the user's other processes.

    A reward function runs in one of them, and our environment contains tokens; a command that runs one calls this too.
    Afterwards only root may read /proc/PID/environ or attach a debugger. A program that this process starts is open
    again. This is not a security boundary: all processes still have the files and rights of the same user.
    """
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def raise_descriptors() -> None:
    """Raise the soft limit as far as the hard limit and MAX_DESCRIPTORS allow. A higher one stays."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = raised_limit()
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    if wanted < MIN_DESCRIPTORS:
        raise UserError(
            f"A process may open {wanted} files and connections here, but needs at least {MIN_DESCRIPTORS}; "
            "raise the limit with `ulimit -n 1024`."
        )


def raised_limit() -> int:
    """Descriptors that a process has once it has raised its limit; more if its soft limit is higher."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)


def say(error: Exception) -> None:
    # On a full disk the log cannot take the sentence either. The exit code must still arrive.
    with suppress(OSError):
        print(f"error: {error}", file=sys.stderr)
