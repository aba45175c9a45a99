"""One scoring worker as the pool sees it: started, spoken to without ever blocking, killed with all it has started.

It leads its own process group, so a kill reaches programs that a reward function started. Its environment is the
actor's without what looks like a secret: what a completion makes a reward function do must not find a token there.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import msgspec

from actor.score_pipe import Ready, ScoreReply, ScoreRequest, frame, take_body
from shared.config import VerifierConfig
from shared.lifeline import PARENT_PID

ROOT = Path(__file__).resolve().parents[1]
SECRET = re.compile(r"(^|_)(TOKEN|KEY|SECRET|CREDENTIAL|AUTH)S?(_|$)|PASSW", re.IGNORECASE)
READ_BYTES = 1 << 20


class WorkerProcess:
    """A process and the two pipes to it."""

    def __init__(self, verifier: VerifierConfig) -> None:
        self.replies, reply_end = os.pipe()
        self.popen = subprocess.Popen(
            [sys.executable, "-u", "-m", "actor.score_worker", str(reply_end), verifier.kind, verifier.function],
            stdin=subprocess.PIPE,
            bufsize=0,
            pass_fds=(reply_end,),
            start_new_session=True,
            env=environment(),
        )
        os.close(reply_end)
        assert self.popen.stdin is not None
        self.requests = self.popen.stdin.fileno()
        os.set_blocking(self.replies, False)
        os.set_blocking(self.requests, False)
        self.unsent = memoryview(b"")
        self.received = bytearray()
        self.hung_up = False
        self.killed = False

    @property
    def pid(self) -> int:
        """Process id, and process group id."""
        return self.popen.pid

    def send(self, request: ScoreRequest) -> None:
        """Hand over a request; what the pipe does not take now goes with later calls of `flush`."""
        self.unsent = memoryview(frame(request))
        self.flush()

    def flush(self) -> None:
        """Write what the pipe takes. A worker that is gone is noticed on the reading side."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            while self.unsent:
                self.unsent = self.unsent[os.write(self.requests, self.unsent) :]

    def receive(self) -> Ready | ScoreReply | None:
        """The next record, if a whole one is there; msgspec.MsgspecError if it is none of ours."""
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(self.replies, READ_BYTES):
                self.received += chunk
            self.hung_up = True
        body = take_body(self.received)
        return None if body is None else msgspec.msgpack.decode(body, type=Ready | ScoreReply)

    def has_ended(self) -> bool:
        """Whether it is gone or has closed its end; `kill` is then still to be called."""
        # A program that the worker started may hold the pipe open, so the pipe alone does not tell.
        return self.hung_up or self.popen.poll() is not None

    def kill(self) -> str:
        """End the whole process group; says how the worker itself came to its end."""
        if not self.killed:
            self.killed = True
            # Also when the worker itself is gone: the group lives on in what it started. A group of which only a zombie
            # is left answers EPERM on some systems.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
            self.popen.wait()
            os.close(self.replies)
            assert self.popen.stdin is not None
            self.popen.stdin.close()
        return how_it_ended(self.popen.returncode)


def environment() -> dict[str, str]:
    """What a worker may know, and what it needs in order to find our packages and its parent."""
    kept = {name: value for name, value in os.environ.items() if not SECRET.search(name)}
    path = os.pathsep.join([str(ROOT), *filter(None, [kept.get("PYTHONPATH")])])
    return kept | {"PYTHONPATH": path, PARENT_PID: str(os.getpid())}


def how_it_ended(code: int) -> str:
    """An exit code in words."""
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
