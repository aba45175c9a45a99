"""The two ends of the wire: what a learner and an actor can do with it, and how ZeroMQ does it.

    LearnerPort   binds (ROUTER); knows its actors by `peer`, the identity each of them made up for this start
    ActorPort     dials (DEALER); knows one learner

Sockets know only frames; codec.py knows the rest. What a peer sends can spoil nothing but its own message: the learner
gets the fault as a value, so that it can answer Refused. A port belongs to one thread and owns its ZeroMQ context.
Left out on purpose: retries and liveness (the loops' business), and any socket without keys.
"""

import math
import secrets
import time
from typing import Protocol, cast

import zmq

from protocol.codec import decode, encode
from protocol.errors import PeerGone, PeerTimeout, ProtocolError, SecurityError
from protocol.limits import HIGH_WATER_MARK, NUM_FRAMES, SEND_TIMEOUT_S
from protocol.messages import AnyMessage
from protocol.security import ActorKey, LearnerKeys
from protocol.sockets import HandshakeWatch, check_sender, set_up_actor, set_up_learner, start_authenticator

MAX_IDENTITY_BYTES = 255
"""ZeroMQ's own limit."""


class LearnerPort(Protocol):
    """The learner's end."""

    def send(self, peer: bytes, message: AnyMessage) -> None:
        """Queue a message. PeerGone if the peer is not connected, or has taken nothing for the time agreed."""
        ...

    def receive(self, timeout_s: float) -> tuple[bytes, AnyMessage | ProtocolError] | None:
        """Who sent what; a ProtocolError in the message's place says what was wrong with it. None when time is up."""
        ...

    def close(self) -> None:
        """Hand over what is queued, within a second, and let go."""
        ...


class ActorPort(Protocol):
    """An actor's end."""

    def send(self, message: AnyMessage) -> None:
        """Queue a message. PeerTimeout if the queue stays full."""
        ...

    def receive(self, timeout_s: float) -> AnyMessage | None:
        """What the learner sent, or None when time is up. Raises a ProtocolError for what is not a message."""
        ...

    def close(self) -> None:
        """Hand over what is queued, within a second, and let go."""
        ...


class ZmqLearnerPort:
    """LearnerPort over `ipc://` or `tcp://`. With port `*`, `endpoint` tells which one was found."""

    def __init__(
        self,
        endpoint: str,
        keys: LearnerKeys | None,
        high_water_mark: int = HIGH_WATER_MARK,
        send_timeout_s: float = SEND_TIMEOUT_S,
    ) -> None:
        if keys is None:
            raise no_keys(endpoint)
        self.allowed = keys.actor_public
        self.send_timeout_s = send_timeout_s
        self.context = zmq.Context()
        self.authenticator = start_authenticator(self.context, keys.actor_public)
        self.socket = self.context.socket(zmq.ROUTER)
        set_up_learner(self.socket, keys, high_water_mark, send_timeout_s)
        try:
            self.socket.bind(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise ProtocolError(f"Nothing can listen at {endpoint}: {error.strerror}; choose another one.") from error
        self.endpoint = cast(bytes, self.socket.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()

    def send(self, peer: bytes, message: AnyMessage) -> None:
        """Queue a message for one actor."""
        try:
            self.socket.send_multipart([peer, *encode(message)])
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            why = "is not connected" if error.errno == zmq.EHOSTUNREACH else f"took nothing for {self.send_timeout_s} s"
            raise PeerGone(f"{show(peer)} {why}, so a {type(message).__name__} cannot reach it.") from error

    def receive(self, timeout_s: float) -> tuple[bytes, AnyMessage | ProtocolError] | None:
        """The next message of any actor."""
        if not self.socket.poll(milliseconds(timeout_s)):
            return None
        frames = receive_frames(self.socket, NUM_FRAMES + 1)
        peer = frames[0].bytes
        try:
            check_sender(frames[0].get("User-Id"), self.allowed)
            return peer, decode([frame.bytes for frame in frames[1:]])
        except ProtocolError as error:
            return peer, error

    def close(self) -> None:
        """Socket first: the authenticator must outlive it, the context outlives both."""
        self.socket.close()
        self.authenticator.stop()
        self.context.term()


class ZmqActorPort:
    """ActorPort over `ipc://` or `tcp://`. Dials in the background, and again whenever the connection is lost."""

    def __init__(
        self,
        endpoint: str,
        actor_id: str,
        key: ActorKey | None,
        high_water_mark: int = HIGH_WATER_MARK,
        send_timeout_s: float = SEND_TIMEOUT_S,
    ) -> None:
        if key is None:
            raise no_keys(endpoint)
        self.endpoint = endpoint
        self.send_timeout_s = send_timeout_s
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        set_up_actor(self.socket, key, high_water_mark, send_timeout_s)
        self.socket.routing_id = new_identity(actor_id)
        self.watch = HandshakeWatch(self.socket, endpoint, key.file)
        self.poller = zmq.Poller()
        self.poller.register(self.socket, zmq.POLLIN)
        self.poller.register(self.watch.events, zmq.POLLIN)
        try:
            self.socket.connect(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise ProtocolError(f"Nothing can be dialled at {endpoint}: {error.strerror}; correct it.") from error

    def send(self, message: AnyMessage) -> None:
        """Queue a message for the learner, connected or not yet."""
        self.watch.check()
        try:
            self.socket.send_multipart(encode(message))
        except zmq.Again as error:
            # A learner that refused us takes nothing either; that is the better explanation.
            self.watch.check()
            awaited = f"room for a {type(message).__name__}"
            raise PeerTimeout(f"The learner at {self.endpoint}", awaited, self.send_timeout_s) from error

    def receive(self, timeout_s: float) -> AnyMessage | None:
        """The learner's next message. SecurityError when the handshake shows that the keys do not fit."""
        deadline = time.monotonic() + timeout_s
        while ready := dict(self.poller.poll(milliseconds(deadline - time.monotonic()))):
            self.watch.check()
            if self.socket in ready:
                return decode([frame.bytes for frame in receive_frames(self.socket, NUM_FRAMES)])
        return None

    def close(self) -> None:
        """The watch is a socket of its own, which would keep the context alive. Closing twice is harmless."""
        if not self.socket.closed:
            self.socket.disable_monitor()
        self.watch.events.close()
        self.socket.close()
        self.context.term()


def receive_frames(socket: zmq.Socket[bytes], expected: int) -> list[zmq.Frame]:
    """A whole message, one frame more than expected at most: the rest of a longer one is read and dropped."""
    frames = [socket.recv(copy=False)]
    while frames[-1].more:
        frames[expected:] = [socket.recv(copy=False)]
    return frames


def new_identity(actor_id: str) -> bytes:
    """A name that no other start of any actor has, for ZeroMQ mixes up peers of one name."""
    suffix = b"-" + secrets.token_hex(4).encode()
    return actor_id.encode()[: MAX_IDENTITY_BYTES - len(suffix)] + suffix


def show(peer: bytes) -> str:
    """A peer's identity for people."""
    return f"Actor {peer.decode('ascii', 'backslashreplace')}"


def milliseconds(seconds: float) -> int:
    """For `poll`: never rounded down to a busy loop, never negative, which would mean for ever."""
    return max(0, math.ceil(seconds * 1000))


def no_keys(endpoint: str) -> SecurityError:
    """There is no plain mode to fall back to."""
    return SecurityError(f"{endpoint} needs keys, for nothing is sent in the clear; name a key file (--key FILE).")
