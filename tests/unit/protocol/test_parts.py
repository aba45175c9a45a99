"""A large buffer goes in parts, and one policy to many actors: encoded once, whole at each of them."""

import random
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
import zmq

from protocol.access.keys import create_keys, load_actor_key, load_learner_keys
from protocol.codec import decode, encode
from protocol.errors import MalformedMessage
from protocol.limits import PART_BYTES
from protocol.messages import Drain, Heartbeat
from protocol.transport import Outbound, ZmqActorPort, ZmqLearnerPort, from_parts, in_parts
from tests.support.wire_examples import plain, policy

DEADLINE_S = 10.0


@pytest.mark.parametrize("size", [0, 1, PART_BYTES - 1, PART_BYTES, PART_BYTES + 1, 3 * PART_BYTES, 3 * PART_BYTES + 5])
def test_a_buffer_is_divided_and_put_together(size: int) -> None:
    frames = [b"header", b"body", random.Random(size).randbytes(size)]
    parts = [bytes(part) for part in in_parts(frames)]
    assert len(parts) == 2 + max(1, -(-size // PART_BYTES)) and max(map(len, parts)) <= max(PART_BYTES, 6)
    assert from_parts(parts) == frames


PART = bytes(PART_BYTES)
NO_PARTS = {
    "a small one first": [b"x", PART],
    "an empty one last": [PART, b""],
    "a large one last": [PART, PART + b"x"],
    "nothing": [],
}


@pytest.mark.parametrize("parts", NO_PARTS.values(), ids=NO_PARTS.keys())
def test_what_are_no_parts_of_one_buffer_is_no_message(parts: list[bytes]) -> None:
    frames = [*encode(Drain())[:2], *parts]
    assert from_parts(frames) == frames
    with pytest.raises(MalformedMessage, match="has 3 frames"):
        decode(from_parts(frames))
    assert from_parts([]) == []


def test_a_policy_is_encoded_once_for_all_actors_and_kept_as_long_as_the_learner_has_it() -> None:
    outbound, versions = Outbound(), [policy(2 * PART_BYTES, version) for version in range(10)]
    first = outbound.frames(versions[0])
    assert outbound.frames(versions[0]) is first and len(first) == 2 + 3
    assert [frame.bytes for frame in first if isinstance(frame, zmq.Frame)] == [
        bytes(part) for part in in_parts(encode(versions[0]))
    ]
    assert len([outbound.frames(version) for version in versions]) == len(outbound.encoded) == 10
    del versions[:7]
    assert len(outbound.encoded) == 3
    outbound.frames(policy(PART_BYTES, 11))
    assert len(outbound.encoded) == 3


def test_many_actors_get_one_policy_whole(tmp_path: Path) -> None:
    names, large = ["actor0", "actor1", "actor2"], policy(5 * PART_BYTES + 7)
    create_keys(tmp_path / "keys", names)
    with ExitStack() as stack:
        learner = ZmqLearnerPort("tcp://127.0.0.1:*", load_learner_keys(tmp_path / "keys"))
        stack.enter_context(closing(learner))
        keys = [load_actor_key(tmp_path / "keys" / f"{name}.json") for name in names]
        actors = [stack.enter_context(closing(ZmqActorPort(learner.endpoint, key))) for key in keys]
        for actor in actors:
            actor.send(Heartbeat(phase="here"))
            heard = learner.receive(DEADLINE_S)
            assert heard is not None
            for message in (large, Drain()):
                learner.send(heard[0], message)
        for actor in actors:
            got = actor.receive(DEADLINE_S)
            assert got is not None and plain(got) == plain(large)
            assert actor.receive(DEADLINE_S) == Drain()
