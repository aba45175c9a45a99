"""The process that learner and actor are forked from: it has imported what both need, and then only waits.

    python -m launch.supervisor.fork_server FD        FD: a socket of packets, one JSON object each

    to it      {child, argv, environment, log}      start `python -m MODULE ...`, output to the log
    from it    {child, pid}                         born
               {child, code}                        ended; minus the signal number if a signal ended it

A fork shares memory until it is written to, so the libraries are in memory once. The zygote computes nothing, opens no
device and has one thread: what it forks is as good as new. It ends when its socket closes, however that came about,
and ends its children before. What they leave behind, in whatever session, becomes its own and is ended too.
SIGINT, SIGTERM and SIGHUP may go to every process of a run (systemd, a batch system, a logout), and without a zygote
the learner would die before its step is finished. So it is started with them blocked, and its children unblock them:
that way none is lost that was meant for a child.
Left out on purpose: systems other than Linux, whose libraries do not all survive a fork.
"""

import gc
import json
import os
import selectors
import signal
import socket
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

from setproctitle import getproctitle, setproctitle

from shared.process.children import adopt_orphans, end_trees, strays
from shared.process.entry_point import keep_to_itself
from shared.process.parent_death import PARENT_PID, die_with_parent, outlive_parent

MAX_MESSAGE_BYTES = 65_536
LOOK_EVERY_S = 1.0
STRAYS_GRACE_S = 1.0
"""The keeper of the scoring workers needs a moment to end them and to remove its folder."""
STRAYS_TICK_S = 0.02
STRAYS_LIMIT_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Role:
    """What a forked child is to be."""

    argv: list[str]
    """`python -m MODULE ...`"""
    environment: dict[str, str]
    """Set on top of the zygote's own."""
    log: str
    """Takes stdout and stderr."""


class Zygote:
    """Forks on request and tells how its children end."""

    def __init__(self, control: socket.socket) -> None:
        self.control = control
        self.selector = selectors.DefaultSelector()
        self.selector.register(control, selectors.EVENT_READ)
        self.alive: set[int] = set()

    def serve(self) -> Role | None:
        """Returns None when the launcher has gone and, in a child, what this process now is."""
        while True:
            collect_strays(self.alive)
            for key, _ in self.selector.select(LOOK_EVERY_S):
                if key.data is not None:
                    self.collect(key.fd, *key.data)
                elif not (packet := self.hear()):
                    return self.end_all()
                elif (role := self.fork(json.loads(packet))) is not None:
                    return role

    def fork(self, request: dict[str, Any]) -> Role | None:
        """The role, in the child."""
        child = request.pop("child")
        zygote = os.getpid()
        pid = os.fork()
        if pid == 0:
            self.forget()
            os.environ[PARENT_PID] = str(zygote)
            return Role(**request)
        self.alive.add(pid)
        self.selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (child, pid))
        self.tell(child=child, pid=pid)
        return None

    def collect(self, pidfd: int, child: int, pid: int) -> None:
        """A child has ended. Its group goes first: until it is collected, its process id can be nobody else's."""
        self.selector.unregister(pidfd)
        os.close(pidfd)
        # One that ended before it had a session of its own has no group either.
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        self.alive.remove(pid)
        end_strays(self.alive)
        self.tell(child=child, code=os.waitstatus_to_exitcode(status))

    def tell(self, **news: int) -> None:
        """One packet to the launcher, if it is still there; if not, that is noticed next."""
        with suppress(BrokenPipeError, ConnectionResetError):
            self.control.send(json.dumps(news).encode())

    def hear(self) -> bytes:
        """One packet; empty if the launcher has gone, perhaps without having read all news."""
        with suppress(ConnectionResetError):
            return self.control.recv(MAX_MESSAGE_BYTES)
        return b""

    def end_all(self) -> None:
        """Children first: most of what they started ends with them, and clears up."""
        for pid in self.alive:
            os.kill(pid, signal.SIGKILL)
        for pid in self.alive:
            os.waitpid(pid, 0)
        end_strays(set())

    def forget(self) -> None:
        """A child has no part in the zygote's conversations."""
        for key in list(self.selector.get_map().values()):
            os.close(key.fd)
        self.control.detach()
        self.selector.close()


def end_strays(known: set[int]) -> None:
    """Whoever has not gone by itself after a moment is killed, with all below it."""
    began = time.monotonic()
    while (left := strays(known)) and time.monotonic() - began < STRAYS_LIMIT_S:
        if time.monotonic() - began > STRAYS_GRACE_S:
            end_trees(left)
        time.sleep(STRAYS_TICK_S)
        collect_strays(known)


def collect_strays(known: set[int]) -> None:
    """Those that have ended; how the known ones end is for `collect` to see."""
    with suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and ended.si_pid not in known:
            os.waitpid(ended.si_pid, 0)


def preload() -> None:
    """What learner and actor import; frozen, so that collecting garbage does not copy shared pages."""
    import actor.wiring  # noqa: F401
    import learner.session  # noqa: F401

    gc.collect()
    gc.freeze()


def become(role: Role) -> int:
    """Run the module's `start` as this process; returns its exit code."""
    os.setsid()
    log = os.open(role.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.environ.update(role.environment)
    setproctitle(title(role.argv))
    module, *words = role.argv[2:]
    if module == "learner":
        from learner.__main__ import start
    else:
        from actor.__main__ import start
    return start(words)


def title(argv: list[str]) -> str:
    """What `ps` shows. A path may hold bytes that are no text, which setproctitle does not take."""
    return os.fsencode(" ".join(argv)).decode(errors="replace")


def live(role: Role) -> NoReturn:
    """To the end, without Python's own clearing up there, which would touch every shared page and so copy it."""
    code = 1
    try:
        code = become(role)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main(descriptor: int) -> int:
    """The zygote's life, or that of one of its children."""
    # A first call measures the room for a title, which is whole only while the environment is untouched.
    getproctitle()
    die_with_parent()
    keep_to_itself()
    preload()
    adopt_orphans()
    outlive_parent()
    role = Zygote(socket.socket(fileno=descriptor)).serve()
    if role is None:
        return 0
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    live(role)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
