"""The messages between the pool, the fork server and the scoring workers, and their bytes.

    pool -> fork server    StartWorker(number) with three descriptors, KillWorker(number)
    fork server -> pool    WorkerExited(number, code)      a worker and all it had started are gone
    pool -> worker         ScoreCall
    worker -> pool         Ready, then for each call: Scored once or several times, or Failed

Fork server and pool share a packet socket: one message per packet. A pipe to a worker carries one frame per message:
four bytes of length, big-endian, then the message as msgpack. What a worker sends is not trusted: a frame has a limit,
and the pool checks its content.
"""

import msgspec

from actor.verifiers.verdict import ScoreJob, Verdict

LENGTH_BYTES = 4
MAX_REPLY_BYTES = 64 << 20


class ScoreCall(msgspec.Struct, frozen=True, kw_only=True):
    """Jobs to score in one call of the verifier."""

    number: int
    """Counts the calls of this worker's slot, so that a reply can be matched to its call."""
    jobs: list[ScoreJob]
    """At least one."""


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The first message of a worker."""

    fault: str | None
    """Why the user's function cannot be used, in one sentence; None if it can."""


class Scored(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The verdicts on the next jobs of a call."""

    number: int
    """Number of the call."""
    verdicts: list[Verdict]
    """At least one, in the order of the jobs."""


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The call failed as a whole and has no verdicts."""

    number: int
    """Number of the call."""
    note: str
    """Why, in one sentence."""
    exits: bool
    """Whether the worker exits because it cannot take another call."""


class StartWorker(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Start a worker. Its three descriptors come along: for calls, for replies, and for its output."""

    number: int
    """Identifies the worker from now on."""


class KillWorker(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """End a worker and all it has started. It may already be gone."""

    number: int
    """Of the worker."""


class WorkerExited(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A worker is gone, and so is all it had started."""

    number: int
    """Of the worker."""
    code: int
    """Its exit code; the negative number of the signal that ended it."""


Reply = Ready | Scored | Failed
Command = StartWorker | KillWorker


def frame(message: msgspec.Struct) -> bytes:
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


def take_body(received: bytearray) -> bytes | None:
    """Remove the first complete frame from the buffer and return its body; None if there is none yet."""
    if len(received) < LENGTH_BYTES:
        return None
    end = LENGTH_BYTES + int.from_bytes(received[:LENGTH_BYTES], "big")
    if end > MAX_REPLY_BYTES:
        raise msgspec.ValidationError(f"A reply of {end} bytes; {MAX_REPLY_BYTES} are allowed.")
    if len(received) < end:
        return None
    body = bytes(received[LENGTH_BYTES:end])
    del received[:end]
    return body
