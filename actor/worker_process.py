"""One scoring worker as the pool sees it: two pipes to talk, one for what it prints; nothing here ever blocks."""

import contextlib
import os

import msgspec

from actor.keeper_process import KeeperProcess
from actor.score_pipe import KillWorker, Reply, ScoreRequest, StartWorker, frame, take_body
from actor.worker_output import WorkerOutput

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
