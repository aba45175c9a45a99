"""Options of our ZeroMQ sockets: CURVE with an allow-list, bounded queues, pings, and a bounded wait when closing.

Traps that this module avoids. CURVE without a ZAP handler accepts every key. A handler without a domain is skipped, and
one that starts after `bind` misses the first peers. By default a socket waits for ever when it closes, and accepts
frames of any size. A client whose key is not accepted sees that its sends succeed, and nothing else: HandshakeWatch
reports that. Peers choose their routing ids, so no decision depends on them.
"""

import logging
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import recv_monitor_message

from protocol.access.allow_list import ZAP_DOMAIN, AllowList
from protocol.access.connection_monitor import acked_and_received, as_socket
from protocol.access.keys import HOW_TO_GET_ONE, ActorKey, LearnerKeys
from protocol.errors import NotAccepted, SecurityError
from protocol.limits import (
    HANDSHAKE_MS,
    KEEPALIVE_MS,
    KEEPALIVE_TIMEOUT_MS,
    LINGER_MS,
    LISTEN_BACKLOG,
    MAX_BODY_BYTES,
    MAX_BUFFER_BYTES,
    MAX_HANDSHAKE_FAILURES,
    MAX_INBOUND_BYTES,
)

log = logging.getLogger("protocol")


class HandshakeWatch:
    """Watches the connections of an actor: tells whether its keys fit, whether its socket can still recover, and how
    many bytes have come."""

    def __init__(self, socket: zmq.Socket[bytes], endpoint: str, key_file: Path, silence_s: float) -> None:
        self.endpoint = endpoint
        self.key_file = key_file
        self.silence_s = silence_s
        self.num_failures = 0
        self.failing_since = time.monotonic()
        self.has_succeeded = False
        self.fd = -1
        """ZeroMQ's descriptor of the connection. Not a duplicate, which would keep a closed connection open."""
        self.events = socket.get_monitor_socket(
            zmq.EVENT_CONNECTED
            | zmq.EVENT_DISCONNECTED
            | zmq.EVENT_HANDSHAKE_SUCCEEDED
            | zmq.EVENT_HANDSHAKE_FAILED_AUTH
            | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
            | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        )

    def check(self) -> bool:
        """True if only a new socket helps. SecurityError once it is certain that the keys do not fit.

        A failure with a cause is certain at once, and ZeroMQ does not retry after it. A peer that only hangs up may be
        a learner with another key; it may also be a forwarder whose learner has not started, or a learner that is dying
        or has too many connections. So that counts only after `silence_s`, measured from the first attempt or the last
        success. If the keys fitted before, a handshake error means that bytes were changed on their way: ZeroMQ cannot
        decrypt them and never delivers another message on this socket.
        """
        while self.events.poll(0):
            message = recv_monitor_message(self.events)
            event = message["event"]
            if event in (zmq.EVENT_CONNECTED, zmq.EVENT_DISCONNECTED):
                self.fd = message["value"] if event == zmq.EVENT_CONNECTED else -1
                continue
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.num_failures = 0
                self.has_succeeded = True
                continue
            if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and self.has_succeeded:
                return True
            if event != zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL or self.has_failed_for_long():
                error = NotAccepted if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH else SecurityError
                raise error(f"The learner at {self.endpoint} {self.what_is_wrong(event)}; {HOW_TO_GET_ONE}.")
        return False

    def bytes_received(self) -> int:
        """Over the present connection, 0 without one."""
        if self.fd >= 0:
            # ZeroMQ may have closed it already.
            with suppress(OSError), as_socket(self.fd) as connection:
                return acked_and_received(connection)[1]
        return 0

    def has_failed_for_long(self) -> bool:
        """Count a handshake that ended without a reason; the log says so once."""
        self.num_failures += 1
        if self.num_failures == 1 and self.has_succeeded:
            self.failing_since = time.monotonic()
        if self.num_failures == MAX_HANDSHAKE_FAILURES:
            log.warning(
                "%s hangs up during the handshake: the learner behind it has not started, or it is not the learner "
                "that the key file %s is for; trying for %g s",
                self.endpoint,
                self.key_file,
                self.silence_s,
            )
        return self.num_failures >= MAX_HANDSHAKE_FAILURES and time.monotonic() - self.failing_since > self.silence_s

    def what_is_wrong(self, event: int) -> str:
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            return (
                f"does not accept the key file {self.key_file}: its public key is not in keys/allowed, or its actor"
                " was revoked, or is banned because it flooded or sent invalid messages (the learner's log says which)"
            )
        return f"and the key file {self.key_file} do not belong together (it hung up {self.num_failures} times)"


def start_authenticator(context: zmq.Context[zmq.Socket[bytes]], allow_list: AllowList) -> ThreadAuthenticator:
    """Start the thread that checks keys; it must run before the socket binds."""
    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve_callback(domain=ZAP_DOMAIN, credentials_provider=allow_list)
    return authenticator


def stop_authenticator(authenticator: ThreadAuthenticator) -> None:
    # If its thread has already ended, pyzmq's stop() waits for it for ever.
    holder: Any = authenticator
    if holder.pipe and not authenticator.is_alive():
        holder.pipe.close()
        holder.pipe = None
    authenticator.stop()


def set_up_learner(
    socket: zmq.Socket[bytes], keys: LearnerKeys, high_water_mark: int, send_timeout_s: float, endpoint: str
) -> None:
    """Options of the ROUTER; bind it to the endpoint after this."""
    set_up(socket, high_water_mark, send_timeout_s, endpoint)
    socket.router_mandatory = True
    # An actor that reconnects before its old connection is known to be dead replaces it; otherwise it would be ignored.
    socket.router_handover = True
    socket.curve_server = True
    socket.curve_publickey = keys.public
    socket.curve_secretkey = keys.secret
    # libzmq aborts the process (`!_io_error`) when a peer hangs up while nothing is read from its connection and a ping
    # of ours is due. Nothing is read if its queue is full: so over TCP the queue has no limit and the connection
    # monitor bounds its bytes, which it cannot do over ipc://. Nor is anything read if the actor has connected again
    # meanwhile: so we send no pings of our own, and those of the actor say when its connection counts as dead.
    socket.rcvhwm = 0 if endpoint.startswith("tcp") else high_water_mark
    socket.heartbeat_ivl = 0
    socket.maxmsgsize = MAX_INBOUND_BYTES
    socket.handshake_ivl = HANDSHAKE_MS
    socket.backlog = LISTEN_BACKLOG
    socket.zap_domain = ZAP_DOMAIN.encode()
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)


def set_up_actor(
    socket: zmq.Socket[bytes], key: ActorKey, high_water_mark: int, send_timeout_s: float, endpoint: str
) -> None:
    """Options of the DEALER; connect it to the endpoint after this."""
    set_up(socket, high_water_mark, send_timeout_s, endpoint)
    socket.curve_publickey = key.public
    socket.curve_secretkey = key.secret
    socket.curve_serverkey = key.learner_public
    # The learner closes the connection if no ping follows for so long.
    socket.heartbeat_ttl = KEEPALIVE_TIMEOUT_MS


def set_up(socket: zmq.Socket[bytes], high_water_mark: int, send_timeout_s: float, endpoint: str) -> None:
    # Only for [IPv6], and for *, which then listens on both. Of a name that has both addresses, ZeroMQ would take the
    # IPv6 one, where the learner may not listen.
    socket.ipv6 = endpoint.startswith(("tcp://[", "tcp://*"))
    socket.linger = LINGER_MS
    socket.sndhwm = socket.rcvhwm = high_water_mark
    socket.sndtimeo = round(send_timeout_s * 1000)
    socket.maxmsgsize = max(MAX_BODY_BYTES, MAX_BUFFER_BYTES)
    socket.heartbeat_ivl = KEEPALIVE_MS
    socket.heartbeat_timeout = KEEPALIVE_TIMEOUT_MS
