"""One scoring worker as the pool sees it: a pipe each for calls, replies and printed output. Nothing here blocks.

The output is read all the time, so that a worker that prints a lot neither blocks nor fills the disk. The first 64 KiB
of each call go to the actor's log; the rest is dropped, with one notice. The last lines are kept for the sentence that
says how a worker ended.

A slot is the place of one worker at a time: the worker starts, then is idle or busy with a call; a new worker replaces
one that fails.
"""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from actor.scoring.fork_server_process import ForkServerProcess
from actor.scoring.job_queue import Call, JobQueue, call_limit_s
from actor.scoring.pipe import Failed, KillWorker, Ready, Reply, ScoreCall, Scored, StartWorker, frame, take_body
from actor.verifiers.reward_arguments import MAX_EXTRA_CHARS
from actor.verifiers.verdict import ScoreJob, Verdict, one_line
from protocol.limits import MAX_SCORE
from shared.config.data import VerifierConfig
from shared.config.named_rewards import name_of
from shared.errors import RewardError
from shared.process.children import how_it_ended

READ_BYTES = 1 << 20
OUTPUT_READ_BYTES = 1 << 16
SHOWN_BYTES = 1 << 16
KEPT_BYTES = 2048
MAX_UNDELIVERED = 3
"""A call is not blamed if its worker had ended before it came, unless this happens more often in a row."""


class WorkerOutput:
    """The reading end of a worker's standard output and standard error."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.room = SHOWN_BYTES
        self.tail = b""
        self.hung_up = False
        os.set_blocking(descriptor, False)

    def start_call(self) -> None:
        """Each call may print up to the limit again."""
        self.room = SHOWN_BYTES
        self.tail = b""

    def drain(self) -> None:
        """Read what is there, but only a few times: a worker that prints endlessly must not block the pool."""
        with contextlib.suppress(BlockingIOError):
            for _ in range(16):
                printed = os.read(self.descriptor, OUTPUT_READ_BYTES)
                if not printed:
                    self.hung_up = True
                    return
                self.show(printed)
                self.tail = (self.tail + printed)[-KEPT_BYTES:]

    def show(self, printed: bytes) -> None:
        if not self.room:
            return
        shown = printed[: self.room]
        self.room -= len(shown)
        notice = b"" if self.room else b"\n(the scoring worker prints more than is shown)\n"
        sys.stderr.buffer.write(shown + notice)
        sys.stderr.flush()

    def last_line(self) -> str:
        """The last line that is not blank; empty if there is none."""
        lines = [line for line in self.tail.decode(errors="replace").splitlines() if line.strip()]
        return one_line(lines[-1]) if lines else ""

    def close(self) -> None:
        """A process that still prints gets SIGPIPE."""
        os.close(self.descriptor)


class WorkerProcess:
    """A worker, identified by its number."""

    def __init__(self, fork_server: ForkServerProcess, number: int) -> None:
        self.fork_server = fork_server
        self.number = number
        their_calls, self.calls = os.pipe()
        self.replies, their_replies = os.pipe()
        output, their_output = os.pipe()
        theirs = (their_calls, their_replies, their_output)
        fork_server.send(StartWorker(number=number), theirs)
        for descriptor in theirs:
            os.close(descriptor)
        os.set_blocking(self.replies, False)
        os.set_blocking(self.calls, False)
        self.output = WorkerOutput(output)
        self.unsent = memoryview(b"")
        self.call_reached_pipe = False
        """Whether anything of the last call went into its pipe. If not, the worker had ended before."""
        self.received = bytearray()
        self.hung_up = False
        self.killed = False

    def send(self, call: msgspec.Struct) -> None:
        """Bytes that the pipe does not take now are sent by later calls of `flush`."""
        self.output.start_call()
        self.unsent = memoryview(frame(call))
        self.call_reached_pipe = False
        self.flush()

    def flush(self) -> None:
        """Write what the pipe takes. If the worker is gone, the fork server will report it."""
        with contextlib.suppress(BlockingIOError):
            try:
                while self.unsent:
                    self.unsent = self.unsent[os.write(self.calls, self.unsent) :]
                    self.call_reached_pipe = True
            except BrokenPipeError:
                self.unsent = memoryview(b"")

    def receive(self, kind: Any = Reply) -> Any:
        """The next message of these types, if it is complete, else None; raises ValueError or RecursionError if it is
        not one of ours."""
        body = take_body(self.received)
        if body is None:
            with contextlib.suppress(BlockingIOError):
                chunk = os.read(self.replies, READ_BYTES)
                self.hung_up = not chunk
                self.received += chunk
            body = take_body(self.received)
        return None if body is None else msgspec.msgpack.decode(body, type=kind)

    def kill(self) -> None:
        if not self.killed:
            self.killed = True
            self.output.drain()
            self.fork_server.send(KillWorker(number=self.number))
            os.close(self.calls)
            os.close(self.replies)
            self.output.close()


class Slot:
    """The place of one worker at a time."""

    def __init__(self, verifier: VerifierConfig, start_limit_s: float, new: Callable[[], WorkerProcess]) -> None:
        self.verifier = verifier
        self.start_limit_s = start_limit_s
        self.new = new
        self.num_calls = 0
        self.num_undelivered = 0
        """Calls in a row that no worker lived to get."""
        self.start()

    def start(self) -> None:
        self.worker = self.new()
        self.is_ready = False
        self.is_fresh = True
        self.call: Call | None = None
        self.limit_s = self.start_limit_s
        self.deadline = time.monotonic() + self.limit_s

    def is_idle(self) -> bool:
        return self.is_ready and self.call is None

    def give(self, call: Call, jobs: Sequence[ScoreJob]) -> None:
        self.num_calls += 1
        self.call = call
        self.limit_s = call_limit_s(self.verifier, len(call.jobs))
        self.deadline = time.monotonic() + self.limit_s
        self.worker.send(ScoreCall(number=self.num_calls, jobs=[jobs[job] for job in call.jobs]))

    def collect(self, queue: JobQueue, code: int | None) -> None:
        """Take the worker's output and replies; then replace it if it has ended (with `code`) or is late."""
        worker = self.worker
        worker.output.drain()
        try:
            while self.worker is worker and (reply := worker.receive()) is not None:
                self.take(reply, queue)
        except (ValueError, RecursionError):  # not msgpack, not UTF-8, or lists nested too deeply
            self.replace(queue, "sent something that is no verdict")
        if self.worker is not worker:
            return
        if code is not None and code == -signal.SIGXCPU:
            self.replace(queue, "used up its processor time", timed_out=True)
        elif code is not None:
            self.replace(queue, how_it_ended(code))
        elif time.monotonic() > self.deadline and not self.is_idle():
            self.replace(queue, f"was stopped after {self.limit_s:g} s", timed_out=True)

    def take(self, reply: Reply, queue: JobQueue) -> None:
        """Handle one reply. Each worker has its own pipes, so a reply is never from the worker before it."""
        match reply:
            case Ready(fault=None) if not self.is_ready:
                self.is_ready = True
            case Ready(fault=str(sentence)) if not self.is_ready:
                raise RewardError(sentence)
            case Scored(number=number, verdicts=verdicts) if self.call and number == self.num_calls:
                check(verdicts, self.call, {name_of(spec) for spec in self.verifier.rewards})
                self.call = queue.settle(self.call, verdicts)
                self.is_fresh = False
                self.num_undelivered = 0
                self.deadline = time.monotonic() + self.limit_s
            case Failed(number=number, note=note, exits=False) if self.call and number == self.num_calls:
                queue.fail(self.call, note)
                self.call = None
                self.is_fresh = False
                self.num_undelivered = 0
            case Failed(number=number, note=note, exits=True) if self.call and number == self.num_calls:
                call, self.call = self.call, None
                queue.crash(call, note, is_fresh=self.is_fresh)
                self.replace(queue, "left")
            case _:
                raise msgspec.ValidationError("A reply to no call.")

    def replace(self, queue: JobQueue, what_happened: str, *, timed_out: bool = False) -> None:
        """Start a new worker for one that failed. One that fails while it starts would always do so: RewardError."""
        self.worker.kill()
        if not self.is_ready:
            raise RewardError(
                f"The verifier ({self.verifier.function or self.verifier.kind}) {what_happened} while it was loaded; "
                "the actor's log may say why."
            )
        self.give_up_call(queue, what_happened, timed_out)
        self.start()

    def restart(self, queue: JobQueue, *, alone: bool) -> None:
        """Start again under a new fork server. A worker that was starting may not be the cause of its end. alone:
        whether no other worker had a call; otherwise either call may be the cause."""
        self.worker.kill()
        self.is_fresh = self.is_fresh and alone
        self.give_up_call(queue, "lost its fork server", timed_out=False)
        self.start()

    def give_up_call(self, queue: JobQueue, what_happened: str, timed_out: bool) -> None:
        if not self.call:
            return
        if not self.worker.call_reached_pipe and self.num_undelivered < MAX_UNDELIVERED:
            self.num_undelivered += 1
            queue.waiting.appendleft(self.call)
            return
        last_line = self.worker.output.last_line()
        note = f"The scoring worker {what_happened}." + (f" It last printed: {last_line}" if last_line else "")
        if timed_out:
            queue.time_out(self.call, note)
        else:
            queue.crash(self.call, note, is_fresh=self.is_fresh)


def check(verdicts: Sequence[Verdict], call: Call, names: set[str]) -> None:
    """Refuse what no verifier of ours sends: the user's function may have written into the pipe."""
    if not 0 < len(verdicts) <= len(call.jobs):
        raise msgspec.ValidationError(f"{len(verdicts)} verdicts on {len(call.jobs)} jobs.")
    # Written so that NaN fails too.
    if not all(abs(number) <= MAX_SCORE for verdict in verdicts for number in numbers(verdict)):
        raise msgspec.ValidationError("A score that no verdict can have.")
    if any(verdict.rewards.keys() != names for verdict in verdicts):
        raise msgspec.ValidationError("Other rewards than those asked for.")
    if any(len(text) > MAX_EXTRA_CHARS for verdict in verdicts for text in verdict.extras.values()):
        raise msgspec.ValidationError("A longer text than a function may log.")


def numbers(verdict: Verdict) -> list[float]:
    return [verdict.score, *verdict.rewards.values(), *verdict.metrics.values()]
