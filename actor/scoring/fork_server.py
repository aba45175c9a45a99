"""The fork server of the scoring workers: `python -m actor.scoring.fork_server FD CONFIG SCRATCH`.

Only fork_server_process.py starts it. It loads what the built-in verifiers need and forks workers on command, so a new
worker costs milliseconds, not the import of a computer algebra system. It never runs a user's code, has no threads, and
starts nothing else.

    worker              ends by itself or is killed on command
    orphan              a worker adopts what its children leave behind (PR_SET_CHILD_SUBREAPER), so a double fork with a
                        new session stays in the worker's tree. When the worker is gone, the fork server adopts the
                        orphan and ends it at once
    actor dies          the command socket closes: the fork server kills everything below it and removes the scratch
                        folder
    fork server dies    the kernel ends the workers (shared/process/parent_death.py)
    signal to all       ends the run: the fork server ignores it, outlives the actor, and then cleans up

Not covered: a worker that first kills the fork server can keep what it had started in another session. Workers run as
the actor's user. This protects against accidents and is not a sandbox.
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
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import msgspec

from actor.scoring.pipe import Command, KillWorker, StartWorker, WorkerExited
from actor.scoring.worker import CALLS, REPLIES, preload, work
from shared.config.data import VerifierConfig
from shared.process.children import ASKS_TO_END, adopt_orphans, end_strays, end_trees
from shared.process.parent_death import PARENT_PID, die_with_parent

PACKET_BYTES = 4096
DESCRIPTORS = 3
FREE_FROM = 16


class ForkServer:
    """Starts workers, kills them on command, and reports when they have ended."""

    def __init__(self, commands: socket.socket, work: Callable[[Path], None], scratch: Path) -> None:
        """work: what a worker does, given its own folder."""
        self.commands = commands
        self.work = work
        self.scratch = scratch
        self.workers: dict[int, int] = {}
        """Process id -> the number that the pool gave the worker."""
        self.wakes, wake = os.pipe()
        os.set_blocking(wake, False)
        # The handler does nothing; the byte in the pipe ends the wait.
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)

    def serve(self) -> None:
        """Until the pool closes its end of the socket, on purpose or by dying."""
        poll = select.poll()
        poll.register(self.commands, select.POLLIN)
        poll.register(self.wakes, select.POLLIN)
        try:
            while True:
                ready = {descriptor for descriptor, _ in poll.poll()}
                if self.wakes in ready:
                    os.read(self.wakes, PACKET_BYTES)
                    self.reap()
                if self.commands.fileno() in ready and not self.handle_command():
                    break
        finally:
            end_strays(set())
            shutil.rmtree(self.scratch, ignore_errors=True)

    def handle_command(self) -> bool:
        """False if there will be no more commands."""
        try:
            packet, descriptors, _, _ = socket.recv_fds(self.commands, PACKET_BYTES, DESCRIPTORS)
        except ConnectionResetError:
            # The pool closed its end before it had read all messages.
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
        server_pid, folder = os.getpid(), self.scratch / str(number)
        try:
            # Only the user may enter; removed with the worker.
            folder.mkdir(mode=0o700)
            pid = os.fork()
        except OSError as error:
            sys.exit(f"No worker can start ({error}); free space in {self.scratch.parent}, or allow more processes.")
        if pid == 0:
            self.become_worker(folder, descriptors, server_pid)
        for descriptor in descriptors:
            os.close(descriptor)
        self.workers[pid] = number

    def become_worker(self, folder: Path, descriptors: list[int], server_pid: int) -> NoReturn:
        """In the child: work, then exit without returning into the fork server's code."""
        code = 1
        try:
            leave_fork_server(descriptors, server_pid)
            self.work(folder)
            code = 0
        except BaseException:
            # Nothing may propagate into the fork server's frames.
            traceback.print_exc()
        finally:
            os._exit(code)

    def reap(self) -> None:
        """Reap ended children. For each worker among them, end what it left behind and tell the pool."""
        ended = [(pid, code) for pid, code in reap_children() if pid in self.workers]
        exited = [WorkerExited(number=self.workers.pop(pid), code=code) for pid, code in ended]
        if not exited:
            return
        end_strays(set(self.workers))
        for message in exited:
            with contextlib.suppress(OSError, RecursionError):
                shutil.rmtree(self.scratch / str(message.number))
            with contextlib.suppress(BrokenPipeError):
                self.commands.send(msgspec.msgpack.encode(message))


def reap_children() -> list[tuple[int, int]]:
    """Process id and exit code of every child that has ended."""
    ended: list[tuple[int, int]] = []
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            ended.append((found[0], os.waitstatus_to_exitcode(found[1])))
    return ended


def leave_fork_server(descriptors: list[int], server_pid: int) -> None:
    """Start a session of its own, set up standard streams and pipes, and close everything else."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, *ASKS_TO_END):
        signal.signal(number, signal.SIG_DFL)
    os.setsid()
    os.environ[PARENT_PID] = str(server_pid)
    die_with_parent()
    adopt_orphans()
    # Moved to high numbers first, because any of them may have a number that another one needs.
    calls, replies, output = (fcntl.fcntl(descriptor, fcntl.F_DUPFD, FREE_FROM) for descriptor in descriptors)
    places = {0: os.open(os.devnull, os.O_RDONLY), 1: output, 2: output, CALLS: calls, REPLIES: replies}
    for place, descriptor in places.items():
        os.dup2(descriptor, place, inheritable=place <= 2)
    # Only up to the highest: without close_range(2) Python tries each number, and the limit may be 2**30.
    os.closerange(max(places) + 1, max(map(int, os.listdir("/proc/self/fd"))) + 1)
    # If memory runs out, the kernel should kill this process first: the run loses least.
    Path("/proc/self/oom_score_adj").write_text("1000")


def main() -> None:
    descriptor, config, scratch = sys.argv[1:]
    verifier = msgspec.json.decode(config, type=VerifierConfig)
    preload(verifier.kind)
    serve(int(descriptor), lambda folder: work(verifier, folder), Path(scratch))


def serve(descriptor: int, work: Callable[[Path], None], scratch: Path) -> None:
    """Be a fork server until the pool closes its end."""
    adopt_orphans()
    for number in ASKS_TO_END:
        signal.signal(number, signal.SIG_IGN)
    # Keeps the garbage collector of the workers away from these objects, so that their pages are not copied.
    gc.freeze()
    with socket.socket(fileno=descriptor) as commands:
        commands.set_inheritable(False)
        ForkServer(commands, work, scratch).serve()


if __name__ == "__main__":
    main()
