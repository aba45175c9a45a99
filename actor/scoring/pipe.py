"""What the pool, the keeper and the scoring workers say to each other, and how it looks in the pipe.

    keeper -> pool    Ended(number, code)                        a worker and all it had started are gone
    pool -> keeper    StartWorker(number) with three descriptors, KillWorker(number)
    worker -> pool    Ready, then for each request: Scored once or several times, or Failed
    pool -> worker    ScoreRequest

Keeper and pool share a packet socket: one record a packet. A pipe to a worker carries a frame a record: four bytes of
length, big-endian, then the record as msgpack. What a worker sends is not trusted: a frame has a limit, and the pool
checks what is in it.
"""

import msgspec

from actor.verifiers.verdict import ScoreJob, Verdict

LENGTH_BYTES = 4
MAX_REPLY_BYTES = 64 << 20


class ScoreRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Jobs to be scored in one call."""

    number: int
    """Counts the slot's requests; tells a reply from a leftover."""
    jobs: list[ScoreJob]
    """At least one."""


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The first thing a worker says."""

    fault: str | None
    """Why the user's function cannot be used, in one sentence; None if all is well."""


class Scored(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The verdicts on the next jobs of a request."""

    number: int
    """The request's."""
    verdicts: list[Verdict]
    """At least one, in the request's order."""


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """There are no verdicts: the call failed as a whole."""

    number: int
    """The request's."""
    note: str
    """Why, in one sentence."""
    leaves: bool
    """The worker is not fit for another call."""


class StartWorker(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Start a worker that reads requests from, replies to and prints into the descriptors that come along."""

    number: int
    """Its name from now on."""


class KillWorker(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """End a worker and all it has started; one that is gone already is no fault."""

    number: int
    """Which."""


class Ended(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A worker is gone, and so is all it had started."""

    number: int
    """Which."""
    code: int
    """Its exit code; the negative number of the signal that ended it."""


Reply = Ready | Scored | Failed
Command = StartWorker | KillWorker


def frame(record: ScoreRequest | Reply) -> bytes:
    """A record as it goes into the pipe."""
    body = msgspec.msgpack.encode(record)
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


def take_body(received: bytearray) -> bytes | None:
    """Remove the first whole frame from what has been received, and return its body; None if none is whole yet."""
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
