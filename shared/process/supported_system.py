"""Tandem runs on Linux. Elsewhere every command ends with one sentence before it imports anything else.

What its promises are made of, and only Linux has:

    a reward function that hangs is ended with all it started    /proc, PR_SET_CHILD_SUBREAPER, RLIMIT_AS that is kept
    no process outlives the one that started it                  PR_SET_PDEATHSIG, also after SIGKILL
    workers start as forks of a process with all libraries       fork after threads and BLAS were loaded
    one message is one packet between them                       SOCK_SEQPACKET between local sockets
    freed memory goes back to the system                         malloc_trim of glibc
    who may compute next is a queue of file locks                F_OFD_SETLK, which Linux alone has
    threads fit to the processors that may be used               sched_getaffinity, cgroups

Some have a replacement on macOS (kqueue, or asking twice a second who the parent is), but the first has none: an
orphan of a killed worker cannot be found there, so a reward function that forks could go on unseen. A promise that
holds on some machines alone is worse than a clear answer.
"""

from collections.abc import Mapping

from shared.errors import UserError

REASON = "needs Linux, which alone lets it end a reward function that hangs together with all that it has started"
REMEDIES: Mapping[str, str] = {
    "darwin": "This is macOS, and Tandem {reason}; use it in a Linux container (docker/) or virtual machine.",
    "win32": "This is Windows, and Tandem {reason}; use it in WSL2, which launch/run.ps1 in a clone does for you.",
}
OTHER = "This system is '{system}', and Tandem {reason}; use it in a Linux container or virtual machine."


def refuse_other_systems(system: str) -> None:
    """UserError unless it is Linux. system: `sys.platform`."""
    if system != "linux":
        raise UserError(REMEDIES.get(system, OTHER).format(system=system, reason=REASON))
