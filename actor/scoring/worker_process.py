"""One scoring worker as the pool sees it: two pipes to talk, one for what it prints; nothing here ever blocks.

What a scoring worker prints: drained all the time, so that a flood neither blocks it nor fills the disk.

Of each request's output the first 64 KiB go to the actor's log and the rest is dropped, which is said once. The last
lines are kept for the sentence that says how a worker ended.
"""

import contextlib
import os
import sys

import msgspec

from actor.scoring.keeper_process import KeeperProcess
from actor.scoring.pipe import KillWorker, Reply, ScoreRequest, StartWorker, frame, take_body
from actor.verifiers.verdict import one_line

OUTPUT_READ_BYTES = 1 << 16
SHOWN_BYTES = 1 << 16
KEPT_BYTES = 2048


class WorkerOutput:
    """The reading end of the pipe behind a worker's standard output and errors."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.room = SHOWN_BYTES
        self.tail = b""
        self.hung_up = False
        os.set_blocking(descriptor, False)

    def next_request(self) -> None:
        """Room in the log for what is printed from now on."""
        self.room = SHOWN_BYTES
        self.tail = b""

    def drain(self) -> None:
        """Take what is there, but no more than a few reads: whoever prints without end must not hold the pool."""
        with contextlib.suppress(BlockingIOError):
            for _ in range(16):
                printed = os.read(self.descriptor, OUTPUT_READ_BYTES)
                if not printed:
                    self.hung_up = True
                    return
                self.show(printed)
                self.tail = (self.tail + printed)[-KEPT_BYTES:]

    def show(self, printed: bytes) -> None:
        """As much as there is room for."""
        if not self.room:
            return
        shown = printed[: self.room]
        self.room -= len(shown)
        notice = b"" if self.room else b"\n(the scoring worker prints more than is shown)\n"
        sys.stderr.buffer.write(shown + notice)
        sys.stderr.flush()

    def last_line(self) -> str:
        """The last line that is not blank, or nothing."""
        lines = [line for line in self.tail.decode(errors="replace").splitlines() if line.strip()]
        return one_line(lines[-1]) if lines else ""

    def close(self) -> None:
        """Whoever still prints gets SIGPIPE."""
        os.close(self.descriptor)


READ_BYTES = 1 << 20


class WorkerProcess:
    """A worker by its number, which the keeper knows."""

    def __init__(self, keeper: KeeperProcess, number: int) -> None:
        self.keeper = keeper
        self.number = number
        their_requests, self.requests = os.pipe()
        self.replies, their_replies = os.pipe()
        output, their_output = os.pipe()
        theirs = (their_requests, their_replies, their_output)
        keeper.tell(StartWorker(number=number), theirs)
        for descriptor in theirs:
            os.close(descriptor)
        os.set_blocking(self.replies, False)
        os.set_blocking(self.requests, False)
        self.output = WorkerOutput(output)
        self.unsent = memoryview(b"")
        self.received = bytearray()
        self.hung_up = False
        self.killed = False

    def send(self, request: ScoreRequest) -> None:
        """Hand over a request; what the pipe does not take now goes with later calls of `flush`."""
        self.output.next_request()
        self.unsent = memoryview(frame(request))
        self.flush()

    def flush(self) -> None:
        """Write what the pipe takes. A worker that is gone is noticed by its keeper."""
        with contextlib.suppress(BlockingIOError):
            try:
                while self.unsent:
                    self.unsent = self.unsent[os.write(self.requests, self.unsent) :]
            except BrokenPipeError:
                self.unsent = memoryview(b"")

    def receive(self) -> Reply | None:
        """The next record, if a whole one is there; ValueError or RecursionError if it is none of ours."""
        body = take_body(self.received)
        if body is None:
            with contextlib.suppress(BlockingIOError):
                chunk = os.read(self.replies, READ_BYTES)
                self.hung_up = not chunk
                self.received += chunk
            body = take_body(self.received)
        return None if body is None else msgspec.msgpack.decode(body, type=Reply)

    def kill(self) -> None:
        """Have it and all it has started ended, and forget it."""
        if not self.killed:
            self.killed = True
            self.output.drain()
            self.keeper.tell(KillWorker(number=self.number))
            os.close(self.requests)
            os.close(self.replies)
            self.output.close()
