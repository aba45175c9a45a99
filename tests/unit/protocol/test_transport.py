"""Both ends over real sockets and in memory: order, size, gone and stuck peers, frames that are no message."""

import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from protocol import limits
from protocol.access.keys import ActorKey, LearnerKeys, create_keys, load_actor_key, load_learner_keys
from protocol.codec import decode, encode
from protocol.errors import (
    AddressError,
    MalformedMessage,
    PeerGone,
    PeerTimeout,
    ProtocolError,
    SecurityError,
    WrongVersion,
)
from protocol.messages import PROTOCOL_VERSION, Ack, AnyMessage, Bye, Drain, Heartbeat, Policy
from protocol.sockets import set_up_actor
from protocol.transport import (
    ActorPort,
    LearnerPort,
    ZmqActorPort,
    ZmqLearnerPort,
    milliseconds,
    new_identity,
    receive_frames,
)
from tests.support.memory_transport import MemoryHub
from tests.support.wire_examples import examples, forge, name_of, plain, policy

DEADLINE_S = 10.0


@dataclass(kw_only=True)
class Wire:
    """Keys of a run, and ports that are closed at the end of the test."""

    endpoint: str
    keys: LearnerKeys
    key: ActorKey
    stack: ExitStack = field(default_factory=ExitStack)

    def learner(self, **options: Any) -> ZmqLearnerPort:
        port = self.stack.enter_context(closing(ZmqLearnerPort(self.endpoint, self.keys, **options)))
        self.endpoint = port.endpoint
        return port

    def actor(self, **options: Any) -> ZmqActorPort:
        return self.stack.enter_context(closing(ZmqActorPort(self.endpoint, self.key, **options)))


@contextmanager
def new_wire(kind: str, keys_dir: Path) -> Iterator[Wire]:
    """A place to meet. A socket's path must be shorter than pytest's own folders may be."""
    create_keys(keys_dir)
    keys, key = load_learner_keys(keys_dir), load_actor_key(keys_dir / "actor0.json")
    with tempfile.TemporaryDirectory() as folder:
        endpoint = f"ipc://{folder}/socket" if kind == "ipc" else "tcp://127.0.0.1:*"
        made = Wire(endpoint=endpoint, keys=keys, key=key)
        with made.stack:
            yield made


@pytest.fixture(params=["ipc", "tcp"])
def wire(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Wire]:
    with new_wire(request.param, tmp_path / "keys") as made:
        yield made


@pytest.fixture(params=["ipc", "tcp", "memory"])
def ports(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[LearnerPort, ActorPort]]:
    """The same behaviour is asked of every transport."""
    if request.param == "memory":
        hub = MemoryHub()
        yield hub.learner_port(), hub.actor_port("actor0")
        return
    with new_wire(request.param, tmp_path / "keys") as made:
        yield made.learner(), made.actor()


def hear(port: LearnerPort) -> tuple[bytes, AnyMessage | ProtocolError]:
    """The learner's next message, which must come."""
    inbound = port.receive(DEADLINE_S)
    assert inbound is not None
    if not isinstance(inbound.message, ProtocolError):
        assert plain(decode(inbound.frames)) == plain(inbound.message)
    return inbound.peer, inbound.message


def meet(learner: LearnerPort, actor: ActorPort) -> bytes:
    """The learner knows an actor after its first message."""
    actor.send(Heartbeat(phase="here"))
    peer, message = hear(learner)
    assert message == Heartbeat(phase="here")
    return peer


def test_every_message_both_ways(ports: tuple[LearnerPort, ActorPort]) -> None:
    learner, actor = ports
    peer = meet(learner, actor)
    for message in examples():
        actor.send(message)
        source, heard = hear(learner)
        assert source == peer
        assert not isinstance(heard, ProtocolError)
        assert plain(heard) == plain(message)
        learner.send(peer, message)
        reply = actor.receive(DEADLINE_S)
        assert reply is not None
        assert name_of(reply) == name_of(message)
        assert plain(reply) == plain(message)


def test_order_is_kept(ports: tuple[LearnerPort, ActorPort]) -> None:
    learner, actor = ports
    peer = meet(learner, actor)
    acks = [Ack(order_id=f"train/{i:06d}/u0") for i in range(200)]
    for ack in acks:
        actor.send(ack)
        learner.send(peer, ack)
    assert [hear(learner)[1] for _ in acks] == acks
    assert [actor.receive(DEADLINE_S) for _ in acks] == acks


def test_two_megabytes(ports: tuple[LearnerPort, ActorPort]) -> None:
    learner, actor = ports
    large = policy(2 * 2**20)
    learner.send(meet(learner, actor), large)
    received = actor.receive(DEADLINE_S)
    assert isinstance(received, Policy)
    assert np.array_equal(received.adapter, large.adapter)
    assert not received.adapter.flags.writeable


def test_waiting_ends(ports: tuple[LearnerPort, ActorPort]) -> None:
    learner, actor = ports
    for timeout_s in (0.0, 0.05):
        start = time.monotonic()
        assert learner.receive(timeout_s) is None
        assert actor.receive(timeout_s) is None
        assert -0.01 <= time.monotonic() - start - 2 * timeout_s < 1


def test_a_wait_of_less_than_a_millisecond_is_a_wait() -> None:
    assert [milliseconds(seconds) for seconds in (-1.0, 0.0, 0.0001, 0.25)] == [0, 0, 1, 250]


def test_an_unknown_peer_is_gone(ports: tuple[LearnerPort, ActorPort]) -> None:
    with pytest.raises(PeerGone, match=r"Actor actor0-1 is not connected, so a Drain cannot reach it\."):
        ports[0].send(b"actor0-1", Drain())


def test_a_closed_actor_is_gone(ports: tuple[LearnerPort, ActorPort]) -> None:
    learner, actor = ports
    peer = meet(learner, actor)
    actor.close()
    with pytest.raises(PeerGone, match=f"{peer.decode()} is not connected"):
        insist(learner, peer)
    learner.close()


def insist(learner: LearnerPort, peer: bytes) -> None:
    """Send until it fails: a socket needs a moment to see that its peer has left."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        learner.send(peer, Drain())
        time.sleep(0.01)


def test_what_is_queued_at_close_still_arrives(ports: tuple[LearnerPort, ActorPort]) -> None:
    learner, actor = ports
    meet(learner, actor)
    actor.send(Bye(reason="drained"))
    actor.close()
    assert hear(learner)[1] == Bye(reason="drained")


def test_a_learner_with_no_room_stops_an_actor_in_time(wire: Wire) -> None:
    wire.endpoint = wire.endpoint.replace("*", "9")  # the discard port, where nobody listens
    actor = wire.actor(high_water_mark=2, send_timeout_s=0.1)
    actor.socket.linger = 0
    with pytest.raises(
        PeerTimeout, match=r"The learner at .* said nothing for 0\.1 s while room for a Drain was awaited"
    ):
        for _ in range(3):
            actor.send(Drain())


def test_an_actor_that_takes_nothing_is_gone(wire: Wire) -> None:
    learner = wire.learner(high_water_mark=4, send_timeout_s=0.1)
    actor = wire.actor(high_water_mark=4)
    peer = meet(learner, actor)
    learner.socket.linger = 0
    with pytest.raises(PeerGone, match=r"read nothing for 0\.1 s, so a Policy cannot reach it"):
        for _ in range(100):
            learner.send(peer, policy(2**20))


def test_full_queues_in_memory() -> None:
    hub = MemoryHub(high_water_mark=1, send_timeout_s=0.01)
    learner, actor = hub.learner_port(), hub.actor_port("actor0")
    actor.send(Drain())
    with pytest.raises(PeerTimeout, match="room for a Drain"):
        actor.send(Drain())
    peer, _ = hear(learner)
    learner.send(peer, Drain())
    with pytest.raises(PeerGone, match="read nothing"):
        learner.send(peer, Drain())


BAD = {
    "one frame": ([b"x"], MalformedMessage),
    "empty": ([b""], MalformedMessage),
    "four frames": ([*encode(Drain()), b""], MalformedMessage),
    "many frames": ([b""] * 10_000, MalformedMessage),
    "other version": (forge("Drain", {}, version=PROTOCOL_VERSION + 1), WrongVersion),
    "unknown type": (forge("Exec", {}), MalformedMessage),
}


@pytest.mark.parametrize(("frames", "error"), BAD.values(), ids=BAD.keys())
def test_bad_frames_spoil_only_themselves(wire: Wire, frames: list[bytes], error: type[ProtocolError]) -> None:
    learner, actor = wire.learner(), wire.actor()
    peer = meet(learner, actor)
    actor.socket.send_multipart(frames)
    source, fault = hear(learner)
    assert source == peer
    assert type(fault) is error
    assert meet(learner, actor) == peer
    learner.socket.send_multipart([peer, *frames])
    with pytest.raises(error):
        actor.receive(DEADLINE_S)
    learner.send(peer, Drain())
    assert actor.receive(DEADLINE_S) == Drain()


def test_a_message_of_very_many_frames_is_not_kept(wire: Wire) -> None:
    learner, actor = wire.learner(), wire.actor()
    actor.socket.send_multipart([b""] * 10_000)
    assert learner.socket.poll(round(DEADLINE_S * 1000))
    assert len(receive_frames(learner.socket, expected=4)[0]) == 5
    assert meet(learner, actor)


@pytest.mark.parametrize(("frames", "error"), BAD.values(), ids=BAD.keys())
def test_bad_frames_in_memory(frames: list[bytes], error: type[ProtocolError]) -> None:
    hub = MemoryHub()
    learner, actor = hub.learner_port(), hub.actor_port("actor0")
    actor.send_frames(frames, "forgery")
    assert type(hear(learner)[1]) is error
    hub.to_actor[actor.peer].put(frames)
    with pytest.raises(error):
        actor.receive(DEADLINE_S)


def test_two_starts_of_one_actor_are_two_peers(wire: Wire) -> None:
    learner, first, second = wire.learner(), wire.actor(), wire.actor()
    peers = [meet(learner, first), meet(learner, second)]
    assert len(set(peers)) == 2
    for peer, actor in zip(peers, (first, second), strict=True):
        learner.send(peer, Ack(order_id=peer.decode()))
        assert actor.receive(DEADLINE_S) == Ack(order_id=peer.decode())
    hub = MemoryHub()
    assert hub.actor_port("actor0").peer != hub.actor_port("actor0").peer


def test_an_identity_fits_with_any_name() -> None:
    assert len(new_identity("a" * 64)) <= 255
    assert new_identity("actor0").startswith(b"actor0-")
    assert new_identity("actor0") != new_identity("actor0")


def test_an_actor_outlives_its_learner(wire: Wire) -> None:
    learner = wire.learner()
    actor = wire.actor()
    peer = meet(learner, actor)
    learner.close()
    again = wire.learner()
    assert meet(again, actor) == peer


def test_a_returning_peer_takes_the_place_of_its_old_connection(wire: Wire) -> None:
    """The learner may not know yet that the old one is dead."""
    learner = wire.learner()
    context = wire.stack.enter_context(zmq.Context())
    opened: list[zmq.Socket[bytes]] = []
    for phase in ("old", "new"):
        socket = wire.stack.enter_context(context.socket(zmq.DEALER))
        set_up_actor(socket, wire.key, limits.HIGH_WATER_MARK, limits.SEND_TIMEOUT_S, wire.endpoint)
        socket.routing_id = b"actor0-same"
        socket.connect(wire.endpoint)
        socket.send_multipart(encode(Heartbeat(phase=phase)))
        assert hear(learner) == (b"actor0-same", Heartbeat(phase=phase))
        opened.append(socket)
    learner.send(b"actor0-same", Drain())
    assert opened[1].poll(round(DEADLINE_S * 1000))
    assert not opened[0].poll(0)


def test_frames_beyond_the_largest_limit_never_reach_us(wire: Wire) -> None:
    assert wire.learner().socket.getsockopt(zmq.MAXMSGSIZE) == limits.MAX_INBOUND_BYTES
    assert wire.actor().socket.getsockopt(zmq.MAXMSGSIZE) == limits.MAX_BUFFER_BYTES


def test_an_actor_does_not_send_what_the_learner_would_not_take(wire: Wire) -> None:
    wire.learner()
    with pytest.raises(MalformedMessage, match=f"limit is {limits.MAX_INBOUND_BYTES}"):
        wire.actor().send(policy(limits.MAX_INBOUND_BYTES + 1))


def test_actors_send_pings_that_count_for_both_sides_and_learners_none(wire: Wire) -> None:
    learner, actor = wire.learner().socket, wire.actor().socket
    assert learner.getsockopt(zmq.HEARTBEAT_IVL) == 0
    assert actor.getsockopt(zmq.HEARTBEAT_IVL) == limits.KEEPALIVE_MS
    for option in (zmq.HEARTBEAT_TIMEOUT, zmq.HEARTBEAT_TTL):
        assert actor.getsockopt(option) == limits.KEEPALIVE_TIMEOUT_MS
    for port in (learner, actor):
        assert port.getsockopt(zmq.LINGER) == limits.LINGER_MS


def test_addresses_that_cannot_be_used(wire: Wire) -> None:
    learner = wire.learner()
    for endpoint in ("tcp://127.0.0.1:no", "carrier://pigeon"):
        with pytest.raises(AddressError, match="The learner cannot listen at"):
            ZmqLearnerPort(endpoint, wire.keys)
        with pytest.raises(AddressError, match="cannot be connected to"):
            ZmqActorPort(endpoint, wire.key)
    if learner.endpoint.startswith("tcp"):
        with pytest.raises(AddressError, match="already in use"):
            ZmqLearnerPort(learner.endpoint, wire.keys)


@pytest.mark.parametrize(
    ("listens", "hosts"),
    [("[::1]", ["[::1]"]), ("*", ["[::1]", "127.0.0.1", "localhost"]), ("0.0.0.0", ["127.0.0.1", "localhost"])],
)
def test_ipv6_works_beside_ipv4(tmp_path: Path, listens: str, hosts: list[str]) -> None:
    try:
        with socket.socket(socket.AF_INET6) as trial:
            trial.bind(("::1", 0))
    except OSError as error:
        if "[::1]" in hosts:
            pytest.skip(f"this machine has no IPv6 loopback ({error})")
    with new_wire("tcp", tmp_path / "keys") as wire:
        wire.endpoint = f"tcp://{listens}:*"
        learner = wire.learner()
        port = learner.endpoint.rpartition(":")[2]
        for host in hosts:
            wire.endpoint = f"tcp://{host}:{port}"
            meet(learner, wire.actor())


def test_no_socket_without_keys(wire: Wire) -> None:
    with pytest.raises(SecurityError, match="needs keys"):
        ZmqLearnerPort(wire.endpoint, None)
    with pytest.raises(SecurityError, match="needs keys"):
        ZmqActorPort(wire.endpoint, None)


def test_a_learner_whose_threads_have_ended_does_not_go_on_as_if_nothing_had_happened(wire: Wire) -> None:
    learner = wire.learner()
    learner.authenticator.pipe.send(b"TERMINATE")
    learner.authenticator.thread.join()
    with pytest.raises(ProtocolError, match=r"The thread that checks keys at .* has ended"):
        learner.receive(0.0)
    learner.close()
    again = wire.learner()
    again.socket.disable_monitor()
    again.monitor.thread.join()
    with pytest.raises(ProtocolError, match=r"The thread that watches the connections at .* has ended"):
        again.receive(0.0)


def test_faults_of_the_socket_itself_are_not_blamed_on_a_peer(wire: Wire) -> None:
    learner = wire.learner()
    learner.socket.close()
    with pytest.raises(zmq.ZMQError, match="non-socket"):
        learner.send(b"actor0-1", Drain())
