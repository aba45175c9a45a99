"""The keeper: `python -m actor.scoring.keeper FD CONFIG SCRATCH`, started by keeper_process.py only.

It loads what the built-in verifiers need and forks workers on command, so a fresh worker costs milliseconds, not the
import of a computer algebra system. It never runs a user's code, has no threads, and starts nothing else.

    worker -----> ends by itself or is killed on command
    orphan -----> a worker adopts what its children leave behind (PR_SET_CHILD_SUBREAPER), so a double fork with a new
                  session stays in its tree; when the worker is gone, the keeper adopts it, and ends it at once
    actor dies    the command socket ends: everything below the keeper is killed, its scratch folder removed
    keeper dies   the kernel ends the workers (lifeline.py)
    a signal to all processes asks the run to end: the keeper outlasts its actor, and then clears up

Not covered: a worker that first kills the keeper keeps what it had hidden in another session. Workers run as the
actor's user; this is order among accidents, not a sandbox.
"""

import contextlib
import fcntl
import gc
import os
import select
import shutil
import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import NoReturn

import msgspec

from actor.scoring.pipe import Command, Ended, KillWorker, StartWorker
from actor.scoring.worker import REPLIES, REQUESTS, preload, work
from shared.config.data import VerifierConfig
from shared.process.children import ASKS_TO_END, adopt_orphans, end_trees, strays
from shared.process.parent_death import PARENT_PID, die_with_parent

PACKET_BYTES = 4096
DESCRIPTORS = 3
FREE_FROM = 16
STRAYS_LIMIT_S = 5.0


class Keeper:
    """Workers by process id, and whoever they leave behind."""

    def __init__(self, commands: socket.socket, verifier: VerifierConfig, scratch: Path) -> None:
        self.commands = commands
        self.verifier = verifier
        self.scratch = scratch
        self.workers: dict[int, int] = {}
        self.wakes, wake = os.pipe()
        os.set_blocking(wake, False)
        # The handler does nothing; the byte in the pipe ends the wait.
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)

    def serve(self) -> None:
        """Until the pool closes its end, on purpose or by dying."""
        poll = select.poll()
        poll.register(self.commands, select.POLLIN)
        poll.register(self.wakes, select.POLLIN)
        try:
            while True:
                ready = {descriptor for descriptor, _ in poll.poll()}
                if self.wakes in ready:
                    os.read(self.wakes, PACKET_BYTES)
                    self.bury()
                if self.commands.fileno() in ready and not self.obey():
                    break
        finally:
            self.end_strays(but=set())
            shutil.rmtree(self.scratch, ignore_errors=True)

    def obey(self) -> bool:
        """One command; False if there will be none."""
        try:
            packet, descriptors, _, _ = socket.recv_fds(self.commands, PACKET_BYTES, DESCRIPTORS)
        except ConnectionResetError:
            # The pool left without having read all news.
            return False
        if not packet:
            return False
        match msgspec.msgpack.decode(packet, type=Command):
            case StartWorker(number=number):
                self.start(number, descriptors)
            case KillWorker(number=number):
                end_trees({pid for pid, known in self.workers.items() if known == number})
        return True

    def start(self, number: int, descriptors: list[int]) -> None:
        """Fork a worker."""
        # Nobody but the user may enter; gone with the worker.
        folder = self.scratch / str(number)
        folder.mkdir(mode=0o700)
        keeper_pid = os.getpid()
        pid = os.fork()
        if pid == 0:
            self.become_worker(folder, descriptors, keeper_pid)
        for descriptor in descriptors:
            os.close(descriptor)
        self.workers[pid] = number

    def become_worker(self, folder: Path, descriptors: list[int], keeper_pid: int) -> NoReturn:
        """In the child: nothing of the keeper remains, and nothing below this call is ever returned to."""
        code = 1
        try:
            leave_keeper(descriptors, keeper_pid)
            work(self.verifier, folder)
            code = 0
        except BaseException:
            # The edge of a process that must not unwind into the keeper's frames.
            traceback.print_exc()
        finally:
            os._exit(code)

    def bury(self) -> None:
        """Collect whoever has ended; where a worker has, end what it left behind, then tell the pool."""
        ended = [Ended(number=self.workers.pop(pid), code=code) for pid, code in collect() if pid in self.workers]
        if not ended:
            return
        self.end_strays(but=set(self.workers))
        for record in ended:
            with contextlib.suppress(OSError, RecursionError):
                shutil.rmtree(self.scratch / str(record.number))
            with contextlib.suppress(BrokenPipeError):
                self.commands.send(msgspec.msgpack.encode(record))

    def end_strays(self, but: set[int]) -> None:
        """End all children but these. What dies may leave us its own children, hence the rounds."""
        deadline = time.monotonic() + STRAYS_LIMIT_S
        while (left := strays(but)) and time.monotonic() < deadline:
            end_trees(left)
            for pid in left:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, 0)


def collect() -> list[tuple[int, int]]:
    """Process id and exit code of every child that has ended."""
    ended: list[tuple[int, int]] = []
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            ended.append((found[0], os.waitstatus_to_exitcode(found[1])))
    return ended


def leave_keeper(descriptors: list[int], keeper_pid: int) -> None:
    """A session of its own; an empty standard input, output and errors into one pipe, nothing of the keeper's open."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, *ASKS_TO_END):
        signal.signal(number, signal.SIG_DFL)
    os.setsid()
    os.environ[PARENT_PID] = str(keeper_pid)
    die_with_parent()
    adopt_orphans()
    # First out of the way, because any of them may sit where another has to go.
    requests, replies, output = (fcntl.fcntl(descriptor, fcntl.F_DUPFD, FREE_FROM) for descriptor in descriptors)
    places = {0: os.open(os.devnull, os.O_RDONLY), 1: output, 2: output, REQUESTS: requests, REPLIES: replies}
    for place, descriptor in places.items():
        os.dup2(descriptor, place, inheritable=place <= 2)
    os.closerange(max(places) + 1, os.sysconf("SC_OPEN_MAX"))
    # Of all processes of the run, this one is the least loss.
    Path("/proc/self/oom_score_adj").write_text("1000")


def main() -> None:
    """Load what is slow to load, then serve."""
    adopt_orphans()
    for number in ASKS_TO_END:
        signal.signal(number, signal.SIG_IGN)
    descriptor, config, scratch = sys.argv[1:]
    verifier = msgspec.json.decode(config, type=VerifierConfig)
    preload(verifier.kind)
    # What is loaded now is never garbage: workers need not look at it, and so do not copy its pages.
    gc.freeze()
    with socket.socket(fileno=int(descriptor)) as commands:
        commands.set_inheritable(False)
        Keeper(commands, verifier, Path(scratch)).serve()


if __name__ == "__main__":
    main()
