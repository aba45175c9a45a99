"""A thread of the learner that watches its connections: logs who was turned away, and cuts who sends too much.

    handshakes   each that fails is logged as what it was: plaintext, another learner's key, another program
    backlog      ZeroMQ bounds the size of a frame, and not the frames of a message that never ends. So for each TCP
                 connection: bytes that the kernel received - those of messages that were taken. When all of these
                 together exceed MAX_BACKLOG_BYTES, the connection with most is cut. What one that has gone left in the
                 queue counts until the queue was empty once
    number       connections beyond MAX_CONNECTIONS are cut at once

Cutting is `shutdown` on a duplicate of the descriptor: ZeroMQ sees the peer hang up. Left out on purpose: the backlog
of `ipc://` connections, of which the kernel does not say how much came; their peers are processes of the same user.
"""

import os
import socket
import struct
import threading
from contextlib import suppress

import zmq
from zmq.utils.monitor import recv_monitor_message

from protocol.limits import BACKLOG_SHARE_BYTES, MAX_BACKLOG_BYTES, MAX_CONNECTIONS
from protocol.tally import Tally

LOOK_EVERY_MS = 50
BYTES_RECEIVED = struct.Struct("<128xQ")
"""tcpi_bytes_received in Linux's struct tcp_info."""
FAILURES: dict[int, str] = {
    zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH: "it does not offer CURVE, and nothing is sent in the clear",
    zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC: "it was meant for a learner with another key",
}


class Connection:
    """One connection, by a descriptor of our own, which stays valid whatever ZeroMQ closes."""

    def __init__(self, fd: int) -> None:
        descriptor = os.dup(fd)
        try:
            self.link = socket.socket(fileno=descriptor)
        except OSError:
            os.close(descriptor)
            raise
        self.taken = 0
        self.spoke = False

    def received(self) -> int:
        """Bytes that came; 0 for `ipc://`."""
        if self.link.family == socket.AF_UNIX:
            return 0
        info = self.link.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, BYTES_RECEIVED.size)
        return int(BYTES_RECEIVED.unpack(info)[0])

    def backlog(self) -> int:
        """Bytes that came and were not taken; a handshake and pings are, too, and do not matter."""
        return max(0, self.received() - self.taken)

    def cut(self) -> None:
        """Hang up; the peer may have done so before."""
        with suppress(OSError):
            self.link.shutdown(socket.SHUT_RDWR)


class Doorkeeper:
    """Watches one ROUTER, from before it binds until it is closed."""

    def __init__(self, router: zmq.Socket[bytes], tally: Tally, max_backlog_bytes: int = MAX_BACKLOG_BYTES) -> None:
        self.tally = tally
        self.max_backlog_bytes = max_backlog_bytes
        self.connections: dict[int, Connection] = {}
        self.lock = threading.Lock()
        self.failure = ""
        self.left_behind = 0
        self.events = router.get_monitor_socket(
            zmq.EVENT_ACCEPTED
            | zmq.EVENT_DISCONNECTED
            | zmq.EVENT_HANDSHAKE_FAILED_AUTH
            | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
            | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
            | zmq.EVENT_MONITOR_STOPPED
        )
        self.thread = threading.Thread(target=self.watch, name="doorkeeper", daemon=True)
        self.thread.start()

    def taken(self, fd: int, num_bytes: int) -> None:
        """A whole message of this connection was taken."""
        with self.lock:
            if connection := self.connections.get(fd):
                connection.spoke = True
                connection.taken += num_bytes

    def drained(self) -> None:
        """No whole message is left, of nobody."""
        self.left_behind = 0

    def cut(self, fd: int, why: str) -> None:
        """Hang up on the sender of a message."""
        with self.lock:
            if connection := self.connections.get(fd):
                self.tally.note("cut a connection", why)
                connection.cut()

    def close(self) -> None:
        """After the ROUTER's monitor was disabled; the thread reads that and ends."""
        self.thread.join()
        self.events.close()
        for connection in self.connections.values():
            connection.link.close()

    def watch(self) -> None:
        """The thread."""
        while True:
            if self.events.poll(LOOK_EVERY_MS):
                event = recv_monitor_message(self.events)
                if event["event"] == zmq.EVENT_MONITOR_STOPPED:
                    return
                with self.lock:
                    self.on_event(event["event"], event["value"])
            with self.lock:
                self.bound_backlog()

    def on_event(self, event: int, value: int) -> None:
        """A failure comes just before the end of its connection."""
        if event == zmq.EVENT_ACCEPTED:
            self.accept(value)
        elif event == zmq.EVENT_DISCONNECTED:
            self.disconnected(value)
        elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            self.failure = FAILURES.get(value, f"it breaks ZeroMQ's handshake (error {value:#x})")
        elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            self.failure = "it left during the handshake, as one does that knows no CURVE"
        else:
            self.failure = "its key was not let in"

    def accept(self, fd: int) -> None:
        """Someone has connected. ZeroMQ may have closed it again meanwhile."""
        with suppress(OSError):
            self.connections[fd] = Connection(fd)
            if len(self.connections) > MAX_CONNECTIONS:
                self.tally.note("cut a connection", f"there are {MAX_CONNECTIONS} already")
                self.connections[fd].cut()

    def disconnected(self, fd: int) -> None:
        """Someone has gone, perhaps before he was looked at; if nothing was ever heard of him, say so."""
        connection = self.connections.pop(fd, None)
        if self.failure:
            self.tally.note(f"refused a connection: {self.failure}")
        elif connection is None or not connection.spoke:
            self.tally.note("refused a connection: it left without a word, as an older ZeroMQ or another program does")
        self.failure = ""
        if connection:
            self.left_behind += connection.backlog()
            connection.link.close()

    def bound_backlog(self) -> None:
        """What nobody has asked for yet must not fill the memory."""
        backlogs = {fd: connection.backlog() for fd, connection in self.connections.items()}
        if self.left_behind + sum(backlogs.values()) <= self.max_backlog_bytes:
            return
        worst = max(backlogs, key=lambda fd: backlogs[fd], default=-1)
        if worst >= 0 and backlogs[worst] > BACKLOG_SHARE_BYTES:
            self.tally.note("cut a connection", f"{backlogs[worst]} bytes came that could not be taken in")
            self.connections[worst].cut()
