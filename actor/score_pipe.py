"""What the pool and a scoring worker say to each other, and how it looks in the pipe.

worker -> pool   Ready, once: the verifier was loaded, or why it was not
pool -> worker   ScoreRequest
worker -> pool   ScoreReply, with the request's number

frame            4 bytes of length (big-endian), then one msgpack record
"""

import msgspec

from actor.verdict import ScoreJob, Verdict

LENGTH_BYTES = 4


class ScoreRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Jobs to be scored in one call."""

    number: int
    """Counts the pool's requests; tells a reply from a leftover."""
    jobs: list[ScoreJob]
    """At least one."""


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The first thing a worker says."""

    fault: str | None
    """Why the user's function cannot be used, in one sentence; None if all is well."""


class ScoreReply(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The verdicts on one request."""

    number: int
    """The request's."""
    verdicts: list[Verdict]
    """One a job, in the request's order."""


def frame(record: ScoreRequest | Ready | ScoreReply) -> bytes:
    """A record as it goes into the pipe."""
    body = msgspec.msgpack.encode(record)
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


def take_body(received: bytearray) -> bytes | None:
    """Remove the first whole frame from what has been received, and return its body; None if none is whole yet."""
    if len(received) < LENGTH_BYTES:
        return None
    end = LENGTH_BYTES + int.from_bytes(received[:LENGTH_BYTES], "big")
    if len(received) < end:
        return None
    body = bytes(received[LENGTH_BYTES:end])
    del received[:end]
    return body
