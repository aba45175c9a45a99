"""A hostile peer with a key of the run: `python -m tests.support.flooder KIND ENDPOINT KEYFILE SECONDS`.

Prints how often it did so. A process of its own, so that its memory is not counted as the learner's.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path

import zmq

from protocol.access.keys import ActorKey, load_actor_key
from protocol.codec import encode
from protocol.messages import Heartbeat, Hello
from protocol.sockets import set_up_actor
from protocol.transport import new_identity
from tests.support.wire_examples import DIGEST, filled_order, group

Dealer = zmq.Socket[bytes]
MIB = bytes(2**20)


def dial(context: "zmq.Context[Dealer]", endpoint: str, key: ActorKey) -> Dealer:
    """A new start of the actor, ready to say anything."""
    dealer = context.socket(zmq.DEALER)
    set_up_actor(dealer, key, high_water_mark=100, send_timeout_s=0.05, endpoint=endpoint)
    dealer.linger = 0
    dealer.routing_id = new_identity(key.actor_id)
    dealer.connect(endpoint)
    return dealer


def hello(key: ActorKey) -> Hello:
    """It will be refused for its digests."""
    return Hello(
        actor_id=key.actor_id,
        engine="none",
        base_digest=DIGEST,
        tokenizer_digest=DIGEST,
        lora_digest=DIGEST,
        rules_digest=DIGEST,
        machine=None,
        mark=0,
        version=None,
        credits=1024,
    )


def endless(dealer: Dealer) -> None:
    """A message of very many frames, none of them too large. ZeroMQ sends nothing before it has the last one."""
    for _ in range(300):
        dealer.send(MIB, zmq.SNDMORE, copy=False)
    dealer.send(b"")


def huge(dealer: Dealer) -> None:
    """Sixty times a MiB as one message of three frames."""
    header, body, _ = encode(Heartbeat(phase="x"))
    dealer.send_multipart([header, body, MIB * 60])


def unasked(dealer: Dealer) -> None:
    """Groups that nobody ordered."""
    dealer.send_multipart(encode(filled_order(*[group(group_id=f"g{number}") for number in range(50)])))


def repeated(context: "zmq.Context[Dealer]", endpoint: str, key: ActorKey) -> Callable[[Dealer], None]:
    """A Hello from a new connection each time."""

    def one(_: Dealer) -> None:
        dealer = dial(context, endpoint, key)
        dealer.send_multipart(encode(hello(key)))
        time.sleep(0.002)
        dealer.close()

    return one


def main(kind: str, endpoint: str, key: ActorKey, seconds: float) -> int:
    """Until the time is up; returns how often."""
    with zmq.Context() as context, dial(context, endpoint, key) as dealer:
        heartbeat = encode(Heartbeat(phase="flood"))
        acts: dict[str, Callable[[Dealer], object]] = {
            "heartbeats": lambda d: d.send_multipart(heartbeat),
            "garbage": lambda d: d.send_multipart([b"\xdd\xff\xff\xff\xff", b"", b""]),
            "hellos": lambda d: d.send_multipart(encode(hello(key))),
            "connections": repeated(context, endpoint, key),
            "unasked groups": unasked,
            "huge frames": huge,
            "endless message": endless,
        }
        done, end = 0, time.monotonic() + seconds
        while time.monotonic() < end:
            try:
                acts[kind](dealer)
                done += 1
            except zmq.Again:
                pass
        return done


if __name__ == "__main__":
    print(main(sys.argv[1], sys.argv[2], load_actor_key(Path(sys.argv[3])), float(sys.argv[4])))
