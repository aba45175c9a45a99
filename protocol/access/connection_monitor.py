"""A thread of the learner that watches its connections. It logs refused peers and cuts connections that cost too much.

    handshakes       each failed one is logged with its cause: no encryption, another learner's key, another program
    unauthenticated  a TCP connection is unauthenticated until its peer has shown that it owns an allowed key. At most
                     MAX_UNAUTHENTICATED of them are open: a new one replaces the oldest. One that sends more than a
                     handshake needs is cut
    number           at most MAX_CONNECTIONS are open; a further one is cut at once
    descriptors      libzmq accepts every connection, and a process without free descriptors cannot open a file. While
                     fewer than a quarter of the descriptors are free, a socket filter makes the kernel drop the packets
                     of new connections. Open connections work on, and a client's kernel repeats its first packet
    backlog          ZeroMQ limits the size of a frame but not the number of frames in a message. So the backlog of a
                     TCP connection is: bytes the kernel received - bytes of messages the learner took. When the sum
                     exceeds MAX_BACKLOG_BYTES, the connection with the largest backlog is cut. The backlog of a closed
                     connection counts until the learner's queue has been empty once

ZeroMQ's events do not say which connection completed its handshake. So a connection counts as authenticated when its
peer has acknowledged more bytes than ZeroMQ sends before authentication. To cut a connection is to call `shutdown` on a
duplicate of its descriptor: ZeroMQ then sees that the peer hung up.

Left out on purpose: `ipc://`. The kernel reports no byte counts for it, and its peers are processes of the same user.
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

from protocol.access.sparse_log import SparseLog
from protocol.limits import (
    BACKLOG_SHARE_BYTES,
    MAX_BACKLOG_BYTES,
    MAX_CONNECTIONS,
    MAX_HANDSHAKE_BYTES,
    MAX_UNAUTHENTICATED,
)

POLL_MS = 50
CONNECTIONS_A_MS = 4
"""It looks at all of them, so with many it looks a millisecond later for each so many."""
IDLE_POLL_MS = 500
"""How often it looks when nothing can have happened without an event: no connection over TCP, and not paused."""
MAX_EVENTS_A_POLL = 64
SPARE_SHARE = 4
BYTES_ACKED_AND_RECEIVED = struct.Struct("<120xQQ")
"""tcpi_bytes_acked and tcpi_bytes_received in Linux's struct tcp_info."""
SENT_BEFORE_AUTHENTICATION = 64 + 170 + 12
"""Most bytes that ZeroMQ sends to an unauthenticated peer: greeting, WELCOME, ERROR. READY, the next message of a
handshake that succeeds, has 67 bytes."""
SO_ATTACH_FILTER = 26
SO_DETACH_FILTER = 27
DROP_ALL = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))
"""A socket filter with one instruction: keep 0 bytes of the packet."""
FILTER = struct.pack("HL", 1, ctypes.addressof(DROP_ALL))
FAILURES: dict[int, str] = {
    zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH: "it does not offer CURVE encryption",
    zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC: "its actor expects a learner with another key",
}


@contextmanager
def as_socket(fd: int) -> Generator[socket.socket]:
    """ZeroMQ's descriptor as a socket object, which does not close it. OSError if it is not an open socket."""
    borrowed = socket.socket(fileno=fd)
    try:
        yield borrowed
    finally:
        borrowed.detach()


def acked_and_received(connection: socket.socket) -> tuple[int, int]:
    """Bytes that the peer has acknowledged, and bytes that it has sent; both 0 for `ipc://`."""
    if connection.family == socket.AF_UNIX:
        return 0, 0
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, BYTES_ACKED_AND_RECEIVED.size)
    acked, received = BYTES_ACKED_AND_RECEIVED.unpack(info)
    return int(acked), int(received)


class Connection:
    """One connection, through our own duplicate of its descriptor: it stays valid when ZeroMQ closes the original."""

    def __init__(self, fd: int) -> None:
        duplicate = os.dup(fd)
        try:
            self.socket = socket.socket(fileno=duplicate)
        except OSError:
            os.close(duplicate)
            raise
        self.bytes_taken = 0
        self.has_sent_message = False

    def is_local(self) -> bool:
        return self.socket.family == socket.AF_UNIX

    def acked_and_received(self) -> tuple[int, int]:
        return acked_and_received(self.socket)

    def backlog(self) -> int:
        # Handshake and pings are included; they are too small to matter.
        return max(0, self.acked_and_received()[1] - self.bytes_taken)

    def is_authenticated(self) -> bool:
        acked, _ = self.acked_and_received()
        return self.has_sent_message or self.is_local() or acked > SENT_BEFORE_AUTHENTICATION

    def shut_down(self) -> None:
        # The peer may have closed it first.
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)


class ConnectionMonitor:
    """Watches one ROUTER socket. Create it before the socket binds."""

    def __init__(
        self,
        router: zmq.Socket[bytes],
        sparse_log: SparseLog,
        max_backlog_bytes: int = MAX_BACKLOG_BYTES,
        max_connections: int = MAX_CONNECTIONS,
    ) -> None:
        self.sparse_log = sparse_log
        self.max_backlog_bytes = max_backlog_bytes
        self.max_connections = max_connections
        self.connections: dict[int, Connection] = {}
        self.unauthenticated: dict[int, Connection] = {}
        """The connections that were unauthenticated at the last check, oldest first."""
        self.cut_fds: set[int] = set()
        """Descriptors of cut connections that ZeroMQ has not closed yet."""
        self.lock = threading.Lock()
        self.failure = ""
        self.departed_bytes = 0
        """Backlog of closed connections, which may still be in ZeroMQ's queue."""
        self.listening_fd = -1
        self.is_paused = False
        self.events = router.get_monitor_socket(
            zmq.EVENT_LISTENING
            | zmq.EVENT_ACCEPTED
            | zmq.EVENT_DISCONNECTED
            | zmq.EVENT_HANDSHAKE_FAILED_AUTH
            | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
            | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
            | zmq.EVENT_MONITOR_STOPPED
        )
        self.thread = threading.Thread(target=self.watch, name="connection monitor", daemon=True)
        self.thread.start()

    def count_message(self, fd: int, num_bytes: int) -> None:
        """The learner took a whole message of this connection."""
        with self.lock:
            if connection := self.connections.get(fd):
                connection.has_sent_message = True
                connection.bytes_taken += num_bytes

    def queue_is_empty(self) -> None:
        """The learner found no message in its queue, so closed connections have left nothing there."""
        self.departed_bytes = 0

    def cut(self, fd: int, why: str) -> None:
        """Cut the connection a message came from."""
        with self.lock:
            if fd in self.connections:
                self.cut_connection(fd, why)

    def is_alive(self) -> bool:
        return self.thread.is_alive()

    def close(self) -> None:
        """Call it after the ROUTER's monitor was disabled: the thread ends when it reads that event."""
        self.thread.join()
        self.events.close()
        for connection in self.connections.values():
            connection.socket.close()

    def watch(self) -> None:
        """Body of the thread."""
        while True:
            self.events.poll(self.poll_ms())
            for _ in range(MAX_EVENTS_A_POLL):
                with self.lock:
                    self.pause_or_resume()
                if not self.events.poll(0):
                    break
                event = recv_monitor_message(self.events)
                if event["event"] == zmq.EVENT_MONITOR_STOPPED:
                    return
                with self.lock:
                    self.on_event(event["event"], event["value"])
            with self.lock:
                self.cut_oversized()

    def poll_ms(self) -> int:
        """Backlogs and descriptors that become free cause no event."""
        with self.lock:
            over_tcp = any(not connection.is_local() for connection in self.connections.values())
            busy_ms = POLL_MS + len(self.connections) // CONNECTIONS_A_MS
        return busy_ms if over_tcp or self.is_paused else IDLE_POLL_MS

    def on_event(self, event: int, value: int) -> None:
        if event == zmq.EVENT_LISTENING:
            self.listening_fd = value
        elif event == zmq.EVENT_ACCEPTED:
            self.on_accepted(value)
        elif event == zmq.EVENT_DISCONNECTED:
            self.on_disconnected(value)
        # A failure has no descriptor; the disconnect of its connection is the next event.
        elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            self.failure = FAILURES.get(value, f"it breaks ZeroMQ's handshake (error {value:#x})")
        elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            self.failure = "it left during the handshake, as a program without CURVE does"
        else:
            self.failure = "its key was not accepted"

    def on_accepted(self, fd: int) -> None:
        if len(self.connections) >= self.max_connections:
            self.cut_unwatched(fd, f"there are {self.max_connections} already")
            return
        try:
            connection = Connection(fd)
        except OSError as error:
            # ZeroMQ may have closed it already.
            self.cut_unwatched(fd, f"it cannot be watched ({error.strerror})")
            return
        self.connections[fd] = self.unauthenticated[fd] = connection
        if len(self.unauthenticated) > MAX_UNAUTHENTICATED:
            self.cut_oldest_unauthenticated()

    def on_disconnected(self, fd: int) -> None:
        connection = self.connections.get(fd)
        if fd in self.cut_fds:
            self.cut_fds.discard(fd)
        elif self.failure:
            self.sparse_log.note(f"refused a connection: {self.failure}")
        elif connection is None or not connection.has_sent_message:
            self.sparse_log.note(
                "refused a connection: it left without a message, as an older ZeroMQ or another program does"
            )
        self.failure = ""
        if connection:
            self.forget(fd)

    def cut_connection(self, fd: int, why: str) -> None:
        self.sparse_log.note("cut a connection", why)
        self.cut_fds.add(fd)
        self.connections[fd].shut_down()
        self.forget(fd)

    def cut_unwatched(self, fd: int, why: str) -> None:
        """Cut a connection that is not in `connections`, through ZeroMQ's own descriptor."""
        self.sparse_log.note("cut a connection", why)
        with suppress(OSError), as_socket(fd) as borrowed:
            self.cut_fds.add(fd)
            borrowed.shutdown(socket.SHUT_RDWR)

    def cut_oldest_unauthenticated(self) -> None:
        while self.unauthenticated:
            fd = next(iter(self.unauthenticated))
            if not self.unauthenticated.pop(fd).is_authenticated():
                self.cut_connection(fd, f"{MAX_UNAUTHENTICATED} newer connections are unauthenticated too")
                return

    def forget(self, fd: int) -> None:
        connection = self.connections.pop(fd)
        self.unauthenticated.pop(fd, None)
        if connection.is_authenticated():
            self.departed_bytes += connection.backlog()
        connection.socket.close()

    def cut_oversized(self) -> None:
        """Cut unauthenticated connections that sent too much, and the largest backlog if all together are too large."""
        for fd, connection in list(self.unauthenticated.items()):
            if connection.acked_and_received()[1] > MAX_HANDSHAKE_BYTES:
                del self.unauthenticated[fd]
                if not connection.is_authenticated():
                    self.cut_connection(fd, f"it sent more than {MAX_HANDSHAKE_BYTES} bytes before it authenticated")
        backlogs = {fd: connection.backlog() for fd, connection in self.connections.items()}
        if self.departed_bytes + sum(backlogs.values()) <= self.max_backlog_bytes:
            return
        worst = max(backlogs, key=lambda fd: backlogs[fd], default=-1)
        if worst >= 0 and backlogs[worst] > BACKLOG_SHARE_BYTES:
            self.cut_connection(worst, f"it sent {backlogs[worst]} bytes that the learner has not taken yet")

    def pause_or_resume(self) -> None:
        """Stop accepting while the process is short of descriptors."""
        if self.listening_fd < 0 or self.is_paused == is_short_of_descriptors():
            return
        self.is_paused = not self.is_paused
        with suppress(OSError), as_socket(self.listening_fd) as listener:
            if self.is_paused:
                self.sparse_log.note("accepting no connections for a moment, because too few descriptors are free")
                listener.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, FILTER)
            else:
                listener.setsockopt(socket.SOL_SOCKET, SO_DETACH_FILTER, 0)


def is_short_of_descriptors() -> bool:
    """Whether fewer than one in SPARE_SHARE is free: the kernel gives a new descriptor the lowest free number."""
    # Linux caps this limit at fs.nr_open, so it is never "unlimited".
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        lowest_free = os.eventfd(0)
    except OSError:
        return True
    os.close(lowest_free)
    return limit - lowest_free < limit // SPARE_SHARE
