"""The two ends of the wire: what a learner and an actor can do with it, and how ZeroMQ does it.

    LearnerPort   binds (ROUTER); knows its actors by `peer`: actor id, '-', random digits made up for this start
    ActorPort     dials (DEALER); knows one learner

Sockets know only frames; codec.py knows the rest. What a peer sends can spoil nothing but its own message: the learner
gets the fault as a value, so that it can answer Refused. Who speaks is known from the key that the connection proved:
a peer whose id is not that of its key is cut off, as is one that floods. A port belongs to one thread and owns its
ZeroMQ context.
Left out on purpose: retries and liveness (the loops' business), and any socket without keys.
"""

import math
import secrets
import time
from typing import Protocol, cast

import zmq

from protocol.access.allow_list import AllowList
from protocol.access.allowance import Conduct
from protocol.access.connection_monitor import Doorkeeper
from protocol.access.keys import ActorKey, LearnerKeys
from protocol.access.sparse_log import Tally
from protocol.codec import check_size, decode, encode
from protocol.errors import PeerGone, PeerTimeout, ProtocolError, SecurityError
from protocol.limits import (
    ALLOWANCE_BURST,
    HIGH_WATER_MARK,
    MAX_BACKLOG_BYTES,
    MAX_INBOUND_BYTES,
    NUM_FRAMES,
    SEND_TIMEOUT_S,
)
from protocol.messages import AnyMessage, Hello, Refused
from protocol.sockets import HandshakeWatch, set_up_actor, set_up_learner, start_authenticator, stop_authenticator

SILENCE_S = 120.0
"""How long an actor tries before it blames its key for handshakes that end without a reason: the default of
`link.silence_s`."""
IDENTITY_BYTES = 16
"""As many random ones as nobody can guess: who knew them could take an actor's place on the socket."""


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
        allowance: float = ALLOWANCE_BURST,
        max_backlog_bytes: int = MAX_BACKLOG_BYTES,
    ) -> None:
        if keys is None:
            raise no_keys(endpoint)
        self.tally = Tally()
        self.conduct = Conduct(allowance)
        self.allow_list = AllowList(keys.allowed, self.conduct, self.tally)
        self.send_timeout_s = send_timeout_s
        self.context = zmq.Context()
        self.authenticator = start_authenticator(self.context, self.allow_list)
        self.socket = self.context.socket(zmq.ROUTER)
        over_tcp = endpoint.startswith("tcp")
        set_up_learner(self.socket, keys, high_water_mark, send_timeout_s, over_tcp=over_tcp)
        self.doorkeeper = Doorkeeper(self.socket, self.tally, max_backlog_bytes)
        try:
            self.socket.bind(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise ProtocolError(f"Nothing can listen at {endpoint}: {error.strerror}; choose another one.") from error
        self.endpoint = cast(bytes, self.socket.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()

    def send(self, peer: bytes, message: AnyMessage) -> None:
        """Queue a message for one actor."""
        if not self.allow_list.allows(owner(peer)):
            raise PeerGone(f"{show(peer)} is not let in any more, so a {type(message).__name__} is not for it.")
        try:
            self.socket.send_multipart([peer, *encode(message)])
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            why = "is not connected" if error.errno == zmq.EHOSTUNREACH else f"took nothing for {self.send_timeout_s} s"
            raise PeerGone(f"{show(peer)} {why}, so a {type(message).__name__} cannot reach it.") from error
        if isinstance(message, Refused):
            self.conduct.refused(owner(peer))

    def receive(self, timeout_s: float) -> tuple[bytes, AnyMessage | ProtocolError] | None:
        """The next message of any actor."""
        self.check_threads()
        deadline = time.monotonic() + timeout_s
        while self.socket.poll(milliseconds(deadline - time.monotonic())):
            if inbound := self.take():
                return inbound
        self.doorkeeper.drained()
        return None

    def check_threads(self) -> None:
        """Without them every handshake fails, or nobody bounds what strangers do, and no message would say so."""
        duties = ((self.authenticator, "decides who comes in"), (self.doorkeeper, "watches the connections"))
        for thread, duty in duties:
            if not thread.is_alive():
                raise ProtocolError(
                    f"The thread that {duty} at {self.endpoint} has ended (its own error is in the log above); "
                    "use `resume` to go on."
                )

    def take(self) -> tuple[bytes, AnyMessage | ProtocolError] | None:
        """One message; None for one whose sender is cut off, which ends what comes from there."""
        frames, num_bytes = receive_frames(self.socket, NUM_FRAMES + 1)
        peer, fd = frames[0].bytes, int(frames[0].get(zmq.SRCFD))
        self.doorkeeper.taken(fd, num_bytes - wire_bytes(frames[0]))
        actor_id = self.allow_list.actor_id(frames[0].get("User-Id"))
        if unwelcome := self.unwelcome(peer, actor_id, num_bytes):
            self.doorkeeper.cut(fd, unwelcome)
            return None
        try:
            message = decode([frame.bytes for frame in frames[1:]])
            check_speaker(message, owner(peer))
        except ProtocolError as error:
            return peer, error
        return peer, message

    def unwelcome(self, peer: bytes, actor_id: str | None, num_bytes: int) -> str:
        """Why a message is not even looked at; empty if it is."""
        if actor_id is None:
            return "its key was removed from keys/allowed"
        if owner(peer) != actor_id:
            return f"{show(peer)} has the key of {actor_id}"
        if self.conduct.is_shut_out(actor_id):
            return f"{actor_id} was refused too often"
        if not self.conduct.spend(actor_id, num_bytes):
            return f"{actor_id} floods"
        return ""

    def close(self) -> None:
        """Socket first: the authenticator must outlive it, the context outlives both. Closing twice is harmless."""
        if not self.socket.closed:
            self.socket.disable_monitor()
        self.doorkeeper.close()
        self.socket.close()
        stop_authenticator(self.authenticator)
        self.context.term()


class ZmqActorPort:
    """ActorPort over `ipc://` or `tcp://`. Dials in the background, and again whenever the connection is lost."""

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
        self.dial()

    def dial(self) -> None:
        """A socket that goes on dialling by itself."""
        self.socket = self.context.socket(zmq.DEALER)
        set_up_actor(self.socket, self.key, self.high_water_mark, self.send_timeout_s)
        self.socket.routing_id = new_identity(self.key.actor_id)
        self.watch = HandshakeWatch(self.socket, self.endpoint, self.key.file, self.silence_s)
        self.poller = zmq.Poller()
        self.poller.register(self.socket, zmq.POLLIN)
        self.poller.register(self.watch.events, zmq.POLLIN)
        try:
            self.socket.connect(self.endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise ProtocolError(f"Nothing can be dialled at {self.endpoint}: {error.strerror}; correct it.") from error

    def check(self) -> None:
        """A new socket for one that is dead for good; what it still held is lost, as with any broken connection."""
        if self.watch.check():
            self.socket.linger = 0
            self.hang_up()
            self.dial()

    def hang_up(self) -> None:
        """The watch is a socket of its own, which would keep the context alive. Doing it twice is harmless."""
        if not self.socket.closed:
            self.socket.disable_monitor()
        self.watch.events.close()
        self.socket.close()

    def send(self, message: AnyMessage) -> None:
        """Queue a message for the learner, connected or not yet."""
        self.check()
        frames = encode(message)
        check_size("buffer", frames[-1], MAX_INBOUND_BYTES)
        try:
            self.socket.send_multipart(frames)
        except zmq.Again as error:
            # A learner that refused us takes nothing either; that is the better explanation.
            self.check()
            awaited = f"room for a {type(message).__name__}"
            raise PeerTimeout(f"The learner at {self.endpoint}", awaited, self.send_timeout_s) from error

    def receive(self, timeout_s: float) -> AnyMessage | None:
        """The learner's next message. SecurityError when the handshake shows that the keys do not fit."""
        deadline = time.monotonic() + timeout_s
        while ready := dict(self.poller.poll(milliseconds(deadline - time.monotonic()))):
            self.check()
            # A socket that was replaced meanwhile has nothing yet.
            if self.socket in ready:
                return decode([frame.bytes for frame in receive_frames(self.socket, NUM_FRAMES)[0]])
        return None

    def close(self) -> None:
        """Closing twice is harmless."""
        self.hang_up()
        self.context.term()


def receive_frames(socket: zmq.Socket[bytes], expected: int) -> tuple[list[zmq.Frame], int]:
    """A whole message, one frame more than expected at most: the rest of a longer one is read and dropped. Second, what
    all of it took on the wire."""
    frames = [socket.recv(copy=False)]
    num_bytes = wire_bytes(frames[0])
    while frames[-1].more:
        frames[expected:] = [socket.recv(copy=False)]
        num_bytes += wire_bytes(frames[-1])
    return frames, num_bytes


def wire_bytes(frame: zmq.Frame) -> int:
    """A frame as ZMTP 3 sends it in CURVE: 33 bytes more in the box, and a header of 2 or 9."""
    boxed = len(frame) + 33
    return boxed + (2 if boxed <= 255 else 9)


def new_identity(actor_id: str) -> bytes:
    """A name that no other start of any actor has, for ZeroMQ mixes up peers of one name."""
    return f"{actor_id}-{secrets.token_hex(IDENTITY_BYTES)}".encode()


def owner(peer: bytes) -> str:
    """The actor whose id a peer's identity begins with."""
    return peer.rpartition(b"-")[0].decode("ascii", "backslashreplace")


def check_speaker(message: AnyMessage, actor_id: str) -> None:
    """An actor says Hello under the name of its key."""
    if isinstance(message, Hello) and message.actor_id != actor_id:
        raise SecurityError(
            f"Actor {message.actor_id} cannot be spoken for with the key of actor {actor_id}; give each its own key."
        )


def show(peer: bytes) -> str:
    """A peer's identity for people."""
    return f"Actor {peer.decode('ascii', 'backslashreplace')}"


def milliseconds(seconds: float) -> int:
    """For `poll`: never rounded down to a busy loop, never negative, which would mean for ever."""
    return max(0, math.ceil(seconds * 1000))


def no_keys(endpoint: str) -> SecurityError:
    """There is no plain mode to fall back to."""
    return SecurityError(f"{endpoint} needs keys, for nothing is sent in the clear; name a key file (--key FILE).")
