"""How our ZeroMQ sockets are set up: CURVE with an allow-list, bounded queues, pings, no endless waits on closing.

Traps this file stands for: CURVE without a ZAP handler admits any key; a handler without a domain is skipped; a handler
started after `bind` misses the first peers; defaults linger for ever and take frames of any size; a client whose key is
not accepted sees sends that succeed, and silence. Hence the order below, and HandshakeWatch. Routing ids are chosen by
peers, so nothing is decided by them.
"""

import logging
import time
from pathlib import Path
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import recv_monitor_message

from protocol.access.allow_list import ZAP_DOMAIN, AllowList
from protocol.access.keys import HOW_TO_GET_ONE, ActorKey, LearnerKeys
from protocol.errors import SecurityError
from protocol.limits import (
    BACKLOG,
    HANDSHAKE_MS,
    KEEPALIVE_MS,
    KEEPALIVE_TIMEOUT_MS,
    LINGER_MS,
    MAX_BODY_BYTES,
    MAX_BUFFER_BYTES,
    MAX_HANDSHAKE_FAILURES,
    MAX_INBOUND_BYTES,
)

log = logging.getLogger("protocol")


class HandshakeWatch:
    """Tells an actor that its key, or the learner's, is not the right one, or that its connection is dead for good."""

    def __init__(self, socket: zmq.Socket[bytes], endpoint: str, key_file: Path, silence_s: float) -> None:
        self.endpoint = endpoint
        self.key_file = key_file
        self.silence_s = silence_s
        self.num_failures = 0
        self.failing_since = time.monotonic()
        self.has_succeeded = False
        self.events = socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED
            | zmq.EVENT_HANDSHAKE_FAILED_AUTH
            | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
            | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        )

    def check(self) -> bool:
        """SecurityError once it is certain. The failures that have a name are certain at once, and ZeroMQ does not try
        again after them. A peer that only hangs up may know another key of the learner's; or it is a forwarder whose
        learner is not there yet, or a learner that dies or has too many callers. So this counts after `silence_s`,
        from the dialling or the last success on.

        True if keys that fitted do so no more: bytes were changed on their way, and what ZeroMQ cannot decrypt makes it
        deaf without a word. Only a new socket helps.
        """
        while self.events.poll(0):
            event = recv_monitor_message(self.events)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.num_failures = 0
                self.has_succeeded = True
                continue
            if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and self.has_succeeded:
                return True
            if event != zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL or self.has_failed_for_long():
                raise SecurityError(f"The learner at {self.endpoint} {self.what_is_wrong(event)}; {HOW_TO_GET_ONE}.")
        return False

    def has_failed_for_long(self) -> bool:
        """One more handshake has ended without a reason. Tells it once in the log, for who waits and looks there."""
        self.num_failures += 1
        if self.num_failures == 1 and self.has_succeeded:
            self.failing_since = time.monotonic()
        if self.num_failures == MAX_HANDSHAKE_FAILURES:
            log.warning(
                "what listens at %s hangs up during the handshake: nothing is behind it yet, or it is not the learner "
                "that the key file %s is for; trying for %g s",
                self.endpoint,
                self.key_file,
                self.silence_s,
            )
        return self.num_failures >= MAX_HANDSHAKE_FAILURES and time.monotonic() - self.failing_since > self.silence_s

    def what_is_wrong(self, event: int) -> str:
        """As far as an actor can know."""
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            return (
                f"does not let in the key file {self.key_file}: its public half is not in keys/allowed, or its actor"
                " sent what no faultless one sends (the learner's log tells)"
            )
        return f"and the key file {self.key_file} do not belong together (it hung up {self.num_failures} times)"


def start_authenticator(context: zmq.Context[zmq.Socket[bytes]], allow_list: AllowList) -> ThreadAuthenticator:
    """The thread that decides who comes in; it must run before any socket binds."""
    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve_callback(domain=ZAP_DOMAIN, credentials_provider=allow_list)
    return authenticator


def stop_authenticator(authenticator: ThreadAuthenticator) -> None:
    """pyzmq tells its thread to end, and waits for ever to do so if that has ended by itself."""
    holder: Any = authenticator
    if holder.pipe and not authenticator.is_alive():
        holder.pipe.close()
        holder.pipe = None
    authenticator.stop()


def set_up_learner(
    socket: zmq.Socket[bytes], keys: LearnerKeys, high_water_mark: int, send_timeout_s: float, *, over_tcp: bool
) -> None:
    """Options of the ROUTER; it is bound after this."""
    set_up(socket, high_water_mark, send_timeout_s)
    socket.router_mandatory = True
    # An actor that comes back before the old connection is known to be dead takes its place, instead of going unheard.
    socket.router_handover = True
    socket.curve_server = True
    socket.curve_publickey = keys.public
    socket.curve_secretkey = keys.secret
    # libzmq aborts the process (`!_io_error`) when a peer hangs up whose queue is full and a ping is due. So over TCP
    # no queue is ever full: the doorkeeper bounds its bytes instead, which it cannot over ipc://.
    socket.rcvhwm = 0 if over_tcp else high_water_mark
    socket.maxmsgsize = MAX_INBOUND_BYTES
    socket.handshake_ivl = HANDSHAKE_MS
    socket.backlog = BACKLOG
    socket.zap_domain = ZAP_DOMAIN.encode()
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)


def set_up_actor(socket: zmq.Socket[bytes], key: ActorKey, high_water_mark: int, send_timeout_s: float) -> None:
    """Options of the DEALER; it is connected after this."""
    set_up(socket, high_water_mark, send_timeout_s)
    socket.curve_publickey = key.public
    socket.curve_secretkey = key.secret
    socket.curve_serverkey = key.learner_public


def set_up(socket: zmq.Socket[bytes], high_water_mark: int, send_timeout_s: float) -> None:
    """Options of both ends."""
    socket.linger = LINGER_MS
    socket.sndhwm = socket.rcvhwm = high_water_mark
    socket.sndtimeo = round(send_timeout_s * 1000)
    socket.maxmsgsize = max(MAX_BODY_BYTES, MAX_BUFFER_BYTES)
    socket.heartbeat_ivl = KEEPALIVE_MS
    socket.heartbeat_timeout = KEEPALIVE_TIMEOUT_MS
