"""The two ends of the wire: what the learner and an actor can do with it, and the ZeroMQ implementation.

    LearnerPort   binds (ROUTER); knows its actors by `peer`: actor id, '-', random digits made up at each actor start
    ActorPort     connects (DEALER); knows one learner

Sockets carry frames; codec.py turns them into messages. A message that cannot be decoded does no other harm: the
learner gets the error as a value, so that it can reply with Refused. The sender of a message is known from the key of
its connection. A peer whose id does not match its key is cut, and so is one that floods. A port belongs to one thread
and owns its ZeroMQ context.
Publishing. What is sent is queued, and ZeroMQ's own thread encrypts and sends it while the learner computes. A policy
is encoded once for all actors, they share its bytes, and it goes in parts, so no more than a part for each is encrypted
at a time. Of several actors on one machine only the first is sent it (actor/passed_on.py). Left out on purpose: retries
and liveness (the dispatcher and the link do that), and any socket without keys.
"""

import math
import secrets
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple, Protocol, cast

import zmq

from protocol.access.allow_list import AllowList
from protocol.access.allowance import Allowances
from protocol.access.connection_monitor import ConnectionMonitor
from protocol.access.keys import ActorKey, LearnerKeys
from protocol.access.sparse_log import SparseLog
from protocol.codec import check_size, decode, encode
from protocol.errors import AddressError, PeerGone, PeerTimeout, ProtocolError, SecurityError
from protocol.limits import (
    ALLOWANCE_BURST,
    HIGH_WATER_MARK,
    MAX_BACKLOG_BYTES,
    MAX_BUFFER_BYTES,
    MAX_INBOUND_BYTES,
    NUM_FRAMES,
    PART_BYTES,
    SEND_TIMEOUT_S,
)
from protocol.messages import AnyMessage, Hello, KeyAdded, NewKey, Policy, Refused
from protocol.sockets import HandshakeWatch, set_up_actor, set_up_learner, start_authenticator, stop_authenticator

SILENCE_S = 120.0
"""How long an actor retries handshakes that fail without a reason before it reports a wrong key; the default of
`link.silence_s`."""
MOST_FRAMES = NUM_FRAMES + MAX_BUFFER_BYTES // PART_BYTES
IDENTITY_BYTES = 16
"""Random bytes of a routing id. A peer that guessed them could take an actor's place on the socket."""


class Inbound(NamedTuple):
    """A message that the learner has received."""

    peer: bytes
    """Who sent it."""
    message: AnyMessage | ProtocolError
    """An error in place of a message that is invalid."""
    frames: Sequence[bytes]
    """As they came, for the journal."""


class LearnerPort(Protocol):
    """The learner's end of the wire."""

    def send(self, peer: bytes, message: AnyMessage) -> None:
        """Queue a message. PeerGone if the peer is not connected, or its queue stayed full for the send timeout."""
        ...

    def receive(self, timeout_s: float) -> Inbound | None:
        """The next message; None at the timeout."""
        ...

    def close(self) -> None:
        """Send what is queued, within a second, and release the socket."""
        ...


class ActorPort(Protocol):
    """An actor's end of the wire."""

    def send(self, message: AnyMessage) -> None:
        """Queue a message. PeerTimeout if the queue stays full."""
        ...

    def receive(self, timeout_s: float) -> AnyMessage | None:
        """The next message, or None at the timeout. ProtocolError if it is invalid."""
        ...

    def bytes_received(self) -> int:
        """Over the present connection, also of a message that is not whole yet. 0 where nobody counts: `ipc://`."""
        ...

    def close(self) -> None:
        """Send what is queued, within a second, and release the socket."""
        ...


class ZmqLearnerPort:
    """LearnerPort over `ipc://` or `tcp://`. After binding to port `*`, `endpoint` has the port that was chosen."""

    def __init__(
        self,
        endpoint: str,
        keys: LearnerKeys | None,
        high_water_mark: int = HIGH_WATER_MARK,
        send_timeout_s: float = SEND_TIMEOUT_S,
        allowance: float = ALLOWANCE_BURST,
        max_backlog_bytes: int = MAX_BACKLOG_BYTES,
    ) -> None:
        if keys is None:
            raise no_keys(endpoint)
        self.sparse_log = SparseLog()
        self.allowances = Allowances(allowance)
        self.allow_list = AllowList(keys.allowed, self.allowances, self.sparse_log)
        self.send_timeout_s = send_timeout_s
        self.outbound = Outbound()
        self.context = zmq.Context()
        self.authenticator = start_authenticator(self.context, self.allow_list)
        self.socket = self.context.socket(zmq.ROUTER)
        set_up_learner(self.socket, keys, high_water_mark, send_timeout_s, endpoint)
        self.monitor = ConnectionMonitor(self.socket, self.sparse_log, max_backlog_bytes)
        try:
            self.socket.bind(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise AddressError(
                f"The learner cannot listen at {endpoint}: {error.strerror}; choose another address."
            ) from error
        self.endpoint = cast(bytes, self.socket.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()

    def send(self, peer: bytes, message: AnyMessage) -> None:
        if not self.allow_list.allows(claimed_actor_id(peer)):
            raise PeerGone(f"{show(peer)} is no longer allowed, so no {type(message).__name__} was sent to it.")
        try:
            self.socket.send_multipart([peer, *self.outbound.frames(message)], copy=False)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            why = "is not connected" if error.errno == zmq.EHOSTUNREACH else f"read nothing for {self.send_timeout_s} s"
            raise PeerGone(f"{show(peer)} {why}, so a {type(message).__name__} cannot reach it.") from error
        if isinstance(message, Refused):
            self.allowances.count_refusal(claimed_actor_id(peer))

    def receive(self, timeout_s: float) -> Inbound | None:
        self.check_threads()
        deadline = time.monotonic() + timeout_s
        while self.socket.poll(milliseconds(deadline - time.monotonic())):
            if received := self.receive_one():
                return received
        self.monitor.queue_is_empty()
        return None

    def check_threads(self) -> None:
        # A dead authenticator fails every handshake and a dead monitor bounds nothing; no other error would show it.
        duties = ((self.authenticator, "checks keys"), (self.monitor, "watches the connections"))
        for thread, duty in duties:
            if not thread.is_alive():
                raise ProtocolError(
                    f"The thread that {duty} at {self.endpoint} has ended (its own error is in the log above); "
                    "continue with `resume`."
                )

    def receive_one(self) -> Inbound | None:
        """The next queued message; None if its sender was cut for it."""
        frames, num_bytes = receive_frames(self.socket, NUM_FRAMES + 1)
        peer, fd = frames[0].bytes, int(frames[0].get(zmq.SRCFD))
        self.monitor.count_message(fd, num_bytes - wire_bytes(frames[0]))
        user_id = frames[0].get("User-Id")
        actor_id = self.allow_list.actor_id(user_id)
        invited = None if actor_id else self.allow_list.invited_id(user_id)
        if why := self.reason_to_cut(peer, actor_id or invited, num_bytes):
            self.monitor.cut(fd, why)
            return None
        content = [frame.bytes for frame in frames[1:]]
        try:
            message = decode(content)
            check_sender(message, claimed_actor_id(peer))
        except ProtocolError as error:
            message = error
        if invited:
            self.admit(peer, fd, invited, message)
            return None
        self.allow_list.saw(claimed_actor_id(peer))
        return Inbound(peer, message, content)

    def admit(self, peer: bytes, fd: int, actor_id: str, message: AnyMessage | ProtocolError) -> None:
        """An invited actor may have its own key added, and nothing else."""
        if not isinstance(message, NewKey):
            self.monitor.cut(fd, f"{actor_id} is invited and sent something else than its key")
            return
        reply: KeyAdded | Refused = KeyAdded()
        try:
            self.allow_list.add_key(actor_id, message.public)
        except SecurityError as error:
            self.sparse_log.note("refused the key of an invited actor", f"{actor_id}: {error}")
            reply = Refused(reason=str(error))
            # Not by `send`, which has nothing for a key that is not in keys/allowed.
            self.allowances.count_refusal(actor_id)
        with suppress(zmq.ZMQError):
            self.socket.send_multipart([peer, *encode(reply)])

    def reason_to_cut(self, peer: bytes, actor_id: str | None, num_bytes: int) -> str:
        """Why a message is not decoded and its connection is cut; empty if it is decoded."""
        if actor_id is None:
            return "its key was removed from keys/allowed, or its invitation was used"
        if claimed_actor_id(peer) != actor_id:
            return f"{show(peer)} has the key of {actor_id}"
        if self.allowances.is_banned(actor_id):
            return f"{actor_id} was refused too often"
        if not self.allowances.spend(actor_id, num_bytes):
            return f"{actor_id} floods"
        return ""

    def close(self) -> None:
        # The authenticator must outlive the socket, and the context both. Closing twice does no harm.
        if not self.socket.closed:
            self.socket.disable_monitor()
        self.monitor.close()
        self.socket.close()
        stop_authenticator(self.authenticator)
        self.context.term()


class Outbound:
    """Encodes what the learner sends, large buffers in parts. Frames of a policy are kept until the Policy is freed,
    and all actors share them."""

    def __init__(self) -> None:
        self.encoded: dict[int, Sequence[zmq.Frame]] = {}
        """Of policies, by `id(message)`: a version may be sent with and without its adapter."""

    def frames(self, message: AnyMessage) -> Sequence[bytes | memoryview | zmq.Frame]:
        if not isinstance(message, Policy):
            return in_parts(encode(message))
        if id(message) not in self.encoded:
            # A Frame is shared by all messages that it is part of; bytes would be copied for each.
            self.encoded[id(message)] = [zmq.Frame(part, copy=False) for part in in_parts(encode(message))]
            weakref.finalize(message, self.encoded.pop, id(message), None)
        return self.encoded[id(message)]


def in_parts(frames: Sequence[bytes]) -> list[bytes | memoryview]:
    """The frames of a message with its buffer divided."""
    header, body, buffer = frames
    if len(buffer) <= PART_BYTES:
        return [header, body, buffer]
    whole = memoryview(buffer)
    return [header, body, *(whole[start : start + PART_BYTES] for start in range(0, len(whole), PART_BYTES))]


def from_parts(frames: Sequence[bytes]) -> list[bytes]:
    """The inverse. Frames that are no parts of one buffer stay as they are, and decode() refuses their number."""
    *full, last = frames[2:] or [b""]
    if not full or any(len(part) != PART_BYTES for part in full) or not 0 < len(last) <= PART_BYTES:
        return list(frames)
    return [*frames[:2], b"".join(frames[2:])]


class ZmqActorPort:
    """ActorPort over `ipc://` or `tcp://`. Connects in the background, and again after the connection is lost."""

    def __init__(
        self,
        endpoint: str,
        key: ActorKey | None,
        high_water_mark: int = HIGH_WATER_MARK,
        send_timeout_s: float = SEND_TIMEOUT_S,
        silence_s: float = SILENCE_S,
    ) -> None:
        if key is None:
            raise no_keys(endpoint)
        self.endpoint = endpoint
        self.key = key
        self.high_water_mark = high_water_mark
        self.send_timeout_s = send_timeout_s
        self.silence_s = silence_s
        self.context = zmq.Context()
        self.connect()

    def connect(self) -> None:
        """Open a socket. It connects, and reconnects, by itself."""
        self.socket = self.context.socket(zmq.DEALER)
        set_up_actor(self.socket, self.key, self.high_water_mark, self.send_timeout_s, self.endpoint)
        self.socket.routing_id = new_identity(self.key.actor_id)
        self.watch = HandshakeWatch(self.socket, self.endpoint, self.key.file, self.silence_s)
        self.poller = zmq.Poller()
        self.poller.register(self.socket, zmq.POLLIN)
        self.poller.register(self.watch.events, zmq.POLLIN)
        try:
            self.socket.connect(self.endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise AddressError(
                f"{self.endpoint} cannot be connected to: {error.strerror}; correct the address."
            ) from error

    def check(self) -> None:
        """SecurityError if the keys do not fit. Replaces a socket that can never recover; its queue is lost, as when
        any connection breaks."""
        if self.watch.check():
            self.socket.linger = 0
            self.disconnect()
            self.connect()

    def disconnect(self) -> None:
        if not self.socket.closed:
            self.socket.disable_monitor()
        # The watch has a socket too, which would keep the context open.
        self.watch.events.close()
        self.socket.close()

    def send(self, message: AnyMessage) -> None:
        self.check()
        frames = encode(message)
        check_size("buffer", frames[-1], MAX_INBOUND_BYTES)
        try:
            self.socket.send_multipart(frames)
        except zmq.Again as error:
            # A learner that refused our key reads nothing either; check() then gives the better error.
            self.check()
            awaited = f"room for a {type(message).__name__}"
            raise PeerTimeout(f"The learner at {self.endpoint}", awaited, self.send_timeout_s) from error

    def receive(self, timeout_s: float) -> AnyMessage | None:
        deadline = time.monotonic() + timeout_s
        while ready := dict(self.poller.poll(milliseconds(deadline - time.monotonic()))):
            self.check()
            # If check() replaced the socket, the new one has no message yet.
            if self.socket in ready:
                return decode(from_parts([frame.bytes for frame in receive_frames(self.socket, MOST_FRAMES)[0]]))
        return None

    def bytes_received(self) -> int:
        return self.watch.bytes_received()

    def close(self) -> None:
        # Closing twice does no harm.
        self.disconnect()
        self.context.term()


def receive_frames(socket: zmq.Socket[bytes], expected: int) -> tuple[list[zmq.Frame], int]:
    """The frames of one message, and its bytes on the wire. Of a longer message only one frame more than expected is
    kept: enough to see that it is too long."""
    frames = [socket.recv(copy=False)]
    num_bytes = wire_bytes(frames[0])
    while frames[-1].more:
        frames[expected:] = [socket.recv(copy=False)]
        num_bytes += wire_bytes(frames[-1])
    return frames, num_bytes


def wire_bytes(frame: zmq.Frame) -> int:
    """Size of a frame as ZMTP 3 sends it with CURVE: 33 bytes of encryption and a header of 2 or 9 bytes."""
    boxed = len(frame) + 33
    return boxed + (2 if boxed <= 255 else 9)


def new_identity(actor_id: str) -> bytes:
    """A routing id for one start of one actor; ZeroMQ confuses peers that share one."""
    return f"{actor_id}-{secrets.token_hex(IDENTITY_BYTES)}".encode()


def claimed_actor_id(peer: bytes) -> str:
    """The actor id at the start of a routing id."""
    return peer.rpartition(b"-")[0].decode("ascii", "backslashreplace")


def check_sender(message: AnyMessage, actor_id: str) -> None:
    """An actor may say Hello only under the actor id of its key."""
    if isinstance(message, Hello) and message.actor_id != actor_id:
        raise SecurityError(
            f"A Hello from actor {message.actor_id} came with the key of actor {actor_id}; give each actor its own key."
        )


def show(peer: bytes) -> str:
    return f"Actor {peer.decode('ascii', 'backslashreplace')}"


def milliseconds(seconds: float) -> int:
    """For `poll`: rounded up, so that a loop never spins; not negative, which would mean no timeout."""
    return max(0, math.ceil(seconds * 1000))


def no_keys(endpoint: str) -> SecurityError:
    return SecurityError(f"{endpoint} needs keys, because every connection is encrypted; name a key file (--key FILE).")
