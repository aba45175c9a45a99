"""A thread of the learner that watches its connections: logs who was turned away, and cuts who sends too much.

    handshakes   each that fails is logged as what it was: plaintext, another learner's key, another program
    the door     a TCP connection waits there until it has proved a key. MAX_AT_DOOR of them do: the one that has waited
                 longest makes room for the next. Who sends more than a handshake needs is cut
    number       beyond MAX_CONNECTIONS nobody is let in
    descriptors  libzmq accepts whatever comes, and a process that has none left cannot open a file. While fewer than
                 one in SPARE_SHARE are free, the kernel drops whatever comes to the listening socket but its old
                 connections; a client repeats its first packet by itself
    backlog      ZeroMQ bounds the size of a frame, and not the frames of a message that never ends. So for each TCP
                 connection: bytes that the kernel received - those of messages that were taken. When all of these
                 together exceed MAX_BACKLOG_BYTES, the connection with most is cut. What one that has gone left in the
                 queue counts until the queue was empty once

A connection has proved its key when its side has acknowledged more bytes than ZeroMQ sends to one that has not: the
monitor does not say whose handshake has succeeded. Cutting is `shutdown` on a duplicate of the descriptor: ZeroMQ sees
the peer hang up. What is cut keeps no duplicate, and one that there is no descriptor for is cut without.

Left out on purpose: `ipc://`, of whose connections the kernel says none of this; their peers are processes of the same
user.
"""

import ctypes
import os
import resource
import socket
import struct
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress

import zmq
from zmq.utils.monitor import recv_monitor_message

from protocol.access.sparse_log import Tally
from protocol.limits import (
    BACKLOG_SHARE_BYTES,
    MAX_AT_DOOR,
    MAX_BACKLOG_BYTES,
    MAX_CONNECTIONS,
    MAX_HANDSHAKE_BYTES,
)

LOOK_EVERY_MS = 50
EVENTS_A_LOOK = 64
SPARE_SHARE = 4
BYTES_ACKED_AND_RECEIVED = struct.Struct("<120xQQ")
"""tcpi_bytes_acked and tcpi_bytes_received in Linux's struct tcp_info."""
SENT_BEFORE_PROOF = 64 + 170 + 12
"""Bytes that ZeroMQ sends before it knows the key at most: greeting, WELCOME, ERROR. READY, which follows the proof,
has 67."""
SO_ATTACH_FILTER = 26
SO_DETACH_FILTER = 27
DROP_ALL = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))
"""A socket filter of one instruction: keep 0 bytes of the packet."""
FILTER = struct.pack("HL", 1, ctypes.addressof(DROP_ALL))
FAILURES: dict[int, str] = {
    zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH: "it does not offer CURVE, and nothing is sent in the clear",
    zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC: "it was meant for a learner with another key",
}


@contextmanager
def borrowed(fd: int) -> Generator[socket.socket]:
    """A descriptor of ZeroMQ's as a socket, left open. OSError if it is none any more."""
    link = socket.socket(fileno=fd)
    try:
        yield link
    finally:
        link.detach()


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

    def counts(self) -> tuple[int, int]:
        """Bytes of ours that the other side has acknowledged, and bytes that came; 0 for `ipc://`."""
        if self.link.family == socket.AF_UNIX:
            return 0, 0
        info = self.link.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, BYTES_ACKED_AND_RECEIVED.size)
        acked, received = BYTES_ACKED_AND_RECEIVED.unpack(info)
        return int(acked), int(received)

    def backlog(self) -> int:
        """Bytes that came and were not taken; a handshake and pings are, too, and do not matter."""
        return max(0, self.counts()[1] - self.taken)

    def has_proved_a_key(self) -> bool:
        """Whether it was let in."""
        return self.spoke or self.link.family == socket.AF_UNIX or self.counts()[0] > SENT_BEFORE_PROOF

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
        self.at_door: dict[int, Connection] = {}
        """Those of them that have not proved a key when last looked at, the oldest first."""
        self.cut_off: set[int] = set()
        """Descriptors that ZeroMQ has still to close."""
        self.lock = threading.Lock()
        self.failure = ""
        self.left_behind = 0
        self.listening = -1
        self.is_shut = False
        self.events = router.get_monitor_socket(
            zmq.EVENT_LISTENING
            | zmq.EVENT_ACCEPTED
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
            if fd in self.connections:
                self.cut_connection(fd, why)

    def is_alive(self) -> bool:
        """Whether the thread still watches."""
        return self.thread.is_alive()

    def close(self) -> None:
        """After the ROUTER's monitor was disabled; the thread reads that and ends."""
        self.thread.join()
        self.events.close()
        for connection in self.connections.values():
            connection.link.close()

    def watch(self) -> None:
        """The thread."""
        while True:
            self.events.poll(LOOK_EVERY_MS)
            for _ in range(EVENTS_A_LOOK):
                with self.lock:
                    self.guard_descriptors()
                if not self.events.poll(0):
                    break
                event = recv_monitor_message(self.events)
                if event["event"] == zmq.EVENT_MONITOR_STOPPED:
                    return
                with self.lock:
                    self.on_event(event["event"], event["value"])
            with self.lock:
                self.bound_backlog()

    def on_event(self, event: int, value: int) -> None:
        """A failure comes just before the end of its connection."""
        if event == zmq.EVENT_LISTENING:
            self.listening = value
        elif event == zmq.EVENT_ACCEPTED:
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
        if len(self.connections) >= MAX_CONNECTIONS:
            self.turn_away(fd, f"there are {MAX_CONNECTIONS} already")
            return
        try:
            connection = Connection(fd)
        except OSError as error:
            self.turn_away(fd, f"it cannot be watched ({error.strerror})")
            return
        self.connections[fd] = self.at_door[fd] = connection
        if len(self.at_door) > MAX_AT_DOOR:
            self.make_room()

    def turn_away(self, fd: int, why: str) -> None:
        """Cut one that we do not hold."""
        self.tally.note("cut a connection", why)
        with suppress(OSError), borrowed(fd) as link:
            self.cut_off.add(fd)
            link.shutdown(socket.SHUT_RDWR)

    def make_room(self) -> None:
        """Whoever has proved a key stays; of the others, the one that has waited longest goes."""
        while self.at_door:
            fd = next(iter(self.at_door))
            if not self.at_door.pop(fd).has_proved_a_key():
                self.cut_connection(fd, f"{MAX_AT_DOOR} others have come that have not proved a key either")
                return

    def cut_connection(self, fd: int, why: str) -> None:
        """Hang up, and hold it no longer."""
        self.tally.note("cut a connection", why)
        self.cut_off.add(fd)
        self.connections[fd].cut()
        self.forget(fd)

    def forget(self, fd: int) -> None:
        """What came from one that was let in may be in the queue still."""
        connection = self.connections.pop(fd)
        self.at_door.pop(fd, None)
        if connection.has_proved_a_key():
            self.left_behind += connection.backlog()
        connection.link.close()

    def disconnected(self, fd: int) -> None:
        """Someone has gone, perhaps before he was looked at; if nothing was ever heard of him, say so."""
        connection = self.connections.get(fd)
        if fd in self.cut_off:
            self.cut_off.discard(fd)
        elif self.failure:
            self.tally.note(f"refused a connection: {self.failure}")
        elif connection is None or not connection.spoke:
            self.tally.note("refused a connection: it left without a word, as an older ZeroMQ or another program does")
        self.failure = ""
        if connection:
            self.forget(fd)

    def bound_backlog(self) -> None:
        """What nobody has asked for yet must not fill the memory."""
        for fd, connection in list(self.at_door.items()):
            if connection.counts()[1] > MAX_HANDSHAKE_BYTES:
                del self.at_door[fd]
                if not connection.has_proved_a_key():
                    self.cut_connection(fd, f"it sent more than {MAX_HANDSHAKE_BYTES} bytes before it had proved a key")
        backlogs = {fd: connection.backlog() for fd, connection in self.connections.items()}
        if self.left_behind + sum(backlogs.values()) <= self.max_backlog_bytes:
            return
        worst = max(backlogs, key=lambda fd: backlogs[fd], default=-1)
        if worst >= 0 and backlogs[worst] > BACKLOG_SHARE_BYTES:
            self.cut_connection(worst, f"{backlogs[worst]} bytes came that could not be taken in")

    def guard_descriptors(self) -> None:
        """Shut the listening socket while the process is short of them, and open it afterwards."""
        if self.listening < 0 or self.is_shut == is_short_of_descriptors():
            return
        self.is_shut = not self.is_shut
        with suppress(OSError), borrowed(self.listening) as listener:
            if self.is_shut:
                self.tally.note("let nobody in for a moment, because too few descriptors are free")
                listener.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, FILTER)
            else:
                listener.setsockopt(socket.SOL_SOCKET, SO_DETACH_FILTER, 0)


def is_short_of_descriptors() -> bool:
    """The kernel gives the lowest free one, so the number of a new one tells."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return False
    try:
        lowest_free = os.eventfd(0)
    except OSError:
        return True
    os.close(lowest_free)
    return limit - lowest_free < limit // SPARE_SHARE
