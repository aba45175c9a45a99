"""The fork server of a run: it imports what learner and actor need, then forks them on request.

    python -m launch.supervisor.fork_server RUN FD    FD: a socket of packets, one JSON object each

    to it      {child, argv, environment, log}      start `python -m MODULE ...`, output to the log
    from it    {child, pid}                         started
               {child, code}                        ended; minus the signal number if a signal ended it

Forked processes share memory until they write to it, so the libraries are in memory once, and so is the tokenizer of
the run if its model was converted before. The fork server computes nothing, opens no device and has one thread,
so its children start from a clean state. When its socket closes, for any reason, it kills its children and ends. It
adopts and ends the processes that its children leave behind, in any session.
SIGINT, SIGTERM and SIGHUP may go to every process of a run (systemd, a batch system, a logout), and without its fork
server the learner would die before its step is finished. So the fork server is started with these signals blocked, and
its children unblock them. That way no signal meant for a child is lost. SIGINT then ends a child at once, as SIGTERM
does: the exception that Python would raise may be lost in a library that goes on after errors.
The scoring workers have a fork server of their own (actor/scoring/fork_server.py): it runs inside the actor's
environment allow-list, passes descriptors and kills on command. Both use shared/process/children.py.
Left out on purpose: systems other than Linux, whose libraries do not all survive a fork.
"""

import gc
import json
import os
import selectors
import signal
import socket
import sys
import traceback
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from setproctitle import getproctitle, setproctitle

from shared.config.load import config_from_json
from shared.process.children import adopt_orphans, end_strays, reap_strays
from shared.process.entry_point import keep_to_itself
from shared.process.free_memory import return_freed_memory
from shared.process.parent_death import PARENT_PID, die_with_parent, outlive_parent
from shared.run.run_dir import RunDir

MAX_MESSAGE_BYTES = 65_536
LOOK_EVERY_S = 1.0
STRAYS_GRACE_S = 1.0
"""The fork server of the scoring workers needs a moment to end them and to remove its folder."""


@dataclass(frozen=True, kw_only=True)
class ChildProgram:
    """What a forked child runs."""

    argv: list[str]
    """`python -m MODULE ...`"""
    environment: dict[str, str]
    """Added to the fork server's own."""
    log: str
    """File for stdout and stderr."""


class ForkServer:
    """Forks on request and reports how its children end."""

    def __init__(self, control: socket.socket) -> None:
        self.control = control
        self.selector = selectors.DefaultSelector()
        self.selector.register(control, selectors.EVENT_READ)
        self.alive: dict[int, int] = {}
        """Process id -> the number that the launcher gave the child."""
        self.wakes, self.wake = os.pipe()
        os.set_blocking(self.wake, False)
        self.selector.register(self.wakes, selectors.EVENT_READ)
        # The handler does nothing; the byte in the pipe ends the wait. Some Pythons and containers lack pidfds.
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self.wake, warn_on_full_buffer=False)

    def serve(self) -> ChildProgram | None:
        """Returns twice over: None in the fork server once the launcher has gone, and in each child its program."""
        while True:
            self.handle_exits()
            reap_strays(set(self.alive))
            for key, _ in self.selector.select(LOOK_EVERY_S):
                if key.fd == self.wakes:
                    os.read(self.wakes, MAX_MESSAGE_BYTES)
                elif not (packet := self.receive()):
                    return self.end_all()
                elif (program := self.fork(json.loads(packet))) is not None:
                    return program

    def fork(self, request: dict[str, Any]) -> ChildProgram | None:
        """Returns the program in the child, None in the fork server."""
        child = request.pop("child")
        server_pid = os.getpid()
        pid = os.fork()
        if pid == 0:
            self.close_inherited()
            os.environ[PARENT_PID] = str(server_pid)
            return ChildProgram(**request)
        self.alive[pid] = child
        self.send(child=child, pid=pid)
        return None

    def handle_exits(self) -> None:
        # WNOWAIT: look without reaping, so that the group can be killed first.
        ended = os.WEXITED | os.WNOHANG | os.WNOWAIT
        for pid in [pid for pid in self.alive if os.waitid(os.P_PID, pid, ended)]:
            self.handle_exit(pid)

    def handle_exit(self, pid: int) -> None:
        """A child has ended: end its group and what it left behind, then report its exit code."""
        # The group first: until the child is reaped, no other process can get its id.
        # A child that ended before it had its own session has no group.
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        child = self.alive.pop(pid)
        end_strays(set(self.alive), STRAYS_GRACE_S)
        self.send(child=child, code=os.waitstatus_to_exitcode(status))

    def send(self, **message: int) -> None:
        # If the launcher has gone, the next receive notices it.
        with suppress(BrokenPipeError, ConnectionResetError):
            self.control.send(json.dumps(message).encode())

    def receive(self) -> bytes:
        """One packet; empty if the launcher has gone."""
        # A reset: the launcher closed its end before it had read all messages.
        with suppress(ConnectionResetError):
            return self.control.recv(MAX_MESSAGE_BYTES)
        return b""

    def end_all(self) -> None:
        """Kill the children first: most of what they started ends with them and cleans up."""
        for pid in self.alive:
            os.kill(pid, signal.SIGKILL)
        for pid in self.alive:
            os.waitpid(pid, 0)
        end_strays(set(), STRAYS_GRACE_S)

    def close_inherited(self) -> None:
        """In a child: close the fork server's descriptors."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.close(self.wakes)
        os.close(self.wake)
        self.control.close()
        self.selector.close()


def preload(run: Path) -> None:
    """Load what learner and actor need. Frozen, so that garbage collection does not write to shared pages."""
    # Imports make no garbage, and looking for it among all that they make takes a twelfth of their time.
    gc.disable()
    import actor.wiring  # noqa: F401
    import learner.session  # noqa: F401

    # Whatever is wrong, a child that loads its own tokenizer meets it again and reports it.
    with suppress(Exception):
        keep_tokenizer(RunDir.open(run))
    gc.collect()
    return_freed_memory()
    gc.freeze()
    gc.enable()


def keep_tokenizer(run: RunDir) -> None:
    """Load it before the first fork; children find it in the cache of `load_tokenizer`. Left out: the first run of a
    model. Converting it here would start threads."""
    from shared.base.cache import existing_base
    from shared.model.prompt import load_tokenizer

    if folder := existing_base(config_from_json(run.config.read_bytes()).model):
        load_tokenizer(folder)


def run_program(program: ChildProgram) -> int:
    """Run the module's `start` in this process; returns its exit code."""
    os.setsid()
    log = os.open(program.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.environ.update(program.environment)
    setproctitle(title(program.argv))
    module, *arguments = program.argv[2:]
    if module == "learner":
        from learner.__main__ import start
    else:
        from actor.__main__ import start
    return start(arguments)


def title(argv: list[str]) -> str:
    """What `ps` shows. A path may contain bytes that are not text, which setproctitle does not accept."""
    return os.fsencode(" ".join(argv)).decode(errors="replace")


def run_and_exit(program: ChildProgram) -> NoReturn:
    """Skips Python's cleanup at exit, which would write to every shared page and so copy it."""
    code = 1
    try:
        code = run_program(program)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main(run: Path, descriptor: int) -> int:
    """Both the fork server and its children run in here."""
    # The first call measures the space for a title, which is complete only while the environment is unchanged.
    getproctitle()
    die_with_parent()
    keep_to_itself()
    preload(run)
    adopt_orphans()
    # From now on the closed socket ends it, so that it can end its children first.
    outlive_parent()
    program = ForkServer(socket.socket(fileno=descriptor)).serve()
    if program is None:
        return 0
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    run_and_exit(program)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
