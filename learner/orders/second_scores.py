"""Scores groups a second time, with the run's verifier in its killable workers, which only the actor's side has.

    learner -> Order, FilledOrder -> python -m actor.score_again -> FilledOrder with the scores found there

The process is started by name when it is first needed, as the launcher starts processes: the learner imports nothing of
the actor. Its messages are those of the wire, each after 4 bytes of length. If it cannot start, ends, or does not
answer within LIMIT_S, the groups stay unchecked, a warning says so, and the next ones start a new process.

Left out on purpose: reward functions and environments, which may answer differently each time.
"""

import logging
import os
import select
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec import structs

from learner.orders.audit import Chosen, Lie
from protocol.codec import decode, encode, pack, unpack
from protocol.messages import FilledOrder, Order, Outcome
from shared.config.data import VerifierKind
from shared.process.busy_cores.gathering import give_all_cores

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = "actor.score_again"
LENGTH = struct.Struct("<I")
LIMIT_S = 300.0
TICK_S = 0.25
UNSURE = (Outcome.TIMEOUT, Outcome.ERROR, Outcome.ABSTAIN)
"""A verifier that was cut short proves nothing about another one."""
log = logging.getLogger("learner.orders.audit")
Rescore = Callable[[Order, FilledOrder], FilledOrder | None]
"""The same order with the scores found here; None if there are none."""


def can_score_again(kind: VerifierKind, *, in_environment: bool) -> bool:
    """Whether the run's verifier gives the same answer each time, so that another one is a lie."""
    return kind in ("gsm8k", "exact", "math") and not in_environment


class NoScoreCheck:
    """Where the verifier cannot be asked again."""

    def __init__(self, why: str) -> None:
        self.why = why

    def lies(self, chosen: Sequence[Chosen]) -> list[Lie]:
        if self.why:
            log.warning("scores of actors are not checked, log-probs are: %s", self.why)
        self.why = ""
        return []


class ScoreCheck:
    """Compares outcomes and scores with those found here."""

    def __init__(self, rescore: Rescore) -> None:
        self.rescore = rescore

    def lies(self, chosen: Sequence[Chosen]) -> list[Lie]:
        return [lie for one in chosen if (lie := self.compared(one))]

    def compared(self, one: Chosen) -> Lie | None:
        order, filled = one.claim.order, one.claim.filled
        alone = structs.replace(order, groups=(order.groups[one.place],), votes=False, teacher=False)
        again = self.rescore(alone, structs.replace(filled, groups=(one.group,)))
        if again is None:
            return None
        (found,) = again.groups
        told = zip(one.group.outcomes, one.group.scores, strict=True)
        for index, (claimed, ours) in enumerate(zip(told, zip(found.outcomes, found.scores, strict=True), strict=True)):
            if claimed != ours and claimed[0] not in UNSURE and ours[0] not in UNSURE:
                evidence = (
                    f"completion {index} of group {one.group.group_id} came as '{claimed[0]}' with a score of"
                    f" {claimed[1]:g}, and the learner's verifier finds '{ours[0]}' and {ours[1]:g}"
                )
                return Lie(actor_id=one.actor_id, evidence=evidence)
        return None


class SecondScores:
    """The process that scores again."""

    def __init__(self, run_dir: Path, meanwhile: Callable[[], None], program: str = PROGRAM) -> None:
        """meanwhile: called while it works, to keep the link alive."""
        self.words = [sys.executable, "-m", program, "--run", str(run_dir)]
        self.meanwhile = meanwhile
        self.process: subprocess.Popen[bytes] | None = None

    def __call__(self, order: Order, filled: FilledOrder) -> FilledOrder | None:
        request = b"".join(framed(pack(encode(message))) for message in (order, filled))
        try:
            reply = decode(unpack(self.exchange(self.process or self.start(), request)))
        except (OSError, EOFError, TimeoutError) as error:
            log.warning("scores are not checked this time: the process that scores again %s", error)
            self.close()
            return None
        assert isinstance(reply, FilledOrder)
        return reply

    def start(self) -> subprocess.Popen[bytes]:
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.process = subprocess.Popen(
            self.words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": path, "PYTHONSAFEPATH": "1"},
        )
        give_all_cores(self.process.pid)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe
            os.set_blocking(pipe.fileno(), False)
        return self.process

    def exchange(self, process: subprocess.Popen[bytes], request: bytes) -> bytes:
        """Send a request, wait for the whole reply."""
        assert process.stdin and process.stdout
        calls, replies = process.stdin.fileno(), process.stdout.fileno()
        unsent, received, deadline = memoryview(request), bytearray(), time.monotonic() + LIMIT_S
        while len(received) < LENGTH.size or len(received) < LENGTH.size + LENGTH.unpack_from(received)[0]:
            if time.monotonic() > deadline:
                raise TimeoutError(f"did not answer within {LIMIT_S:g} s")
            # A learner may have more descriptors than `select` can name.
            poll = select.poll()
            poll.register(replies, select.POLLIN)
            if unsent:
                poll.register(calls, select.POLLOUT)
            ready = dict(poll.poll(TICK_S * 1000))
            if calls in ready:
                unsent = unsent[os.write(calls, unsent[: select.PIPE_BUF]) :]
            if replies in ready:
                received += read_some(replies)
            self.meanwhile()
        return bytes(received[LENGTH.size :])

    def close(self) -> None:
        if self.process:
            self.process.kill()
            self.process.communicate()
            self.process = None


def read_some(descriptor: int) -> bytes:
    if part := os.read(descriptor, 1 << 20):
        return part
    raise EOFError("has ended")


def framed(data: bytes) -> bytes:
    return LENGTH.pack(len(data)) + data
