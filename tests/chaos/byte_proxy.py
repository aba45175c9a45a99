"""A bad line between two TCP sockets on loopback. The bytes that it damages are ciphertext.

    delay     every piece arrives late
    stall     nothing is forwarded for a while, in either direction; the connections stay open
    cut       all connections end, and for a while new ones are refused, as they are before the real port listens
    truncate  a piece loses its tail, and the stream goes on
    corrupt   one bit of a piece is flipped

One thread, one fault at a time, which the test sets and which affects the next piece. It ends with `close`.
"""

import random
import selectors
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

PIECE_BYTES = 1 << 16
TICK_S = 0.02

Direction = Literal["to learner", "to actor"]
Damage = Literal["truncate", "corrupt"]


class ByteProxy:
    """Takes connections on a port of its own, and makes one to the real port for each."""

    def __init__(self, target: int, seed: int) -> None:
        self.target = target
        self.random = random.Random(seed)
        # Bound and not listening, a port refuses.
        self.listener = bound(0)
        self.port: int = self.listener.getsockname()[1]
        self.listening = False
        self.selector = selectors.DefaultSelector()
        self.other: dict[socket.socket, tuple[socket.socket, Direction]] = {}
        self.delay_s = 0.0
        self.stalled_until = self.cut_until = 0.0
        self.armed: dict[Direction, Damage] = {}
        self.done: list[str] = []
        self.closed = False
        self.thread = threading.Thread(target=self.serve, daemon=True)

    def stall(self, seconds: float) -> None:
        """From now on."""
        self.stalled_until = time.monotonic() + seconds
        self.done.append("stall")

    def cut(self, seconds: float) -> None:
        """From now on."""
        self.cut_until = time.monotonic() + seconds
        self.done.append("cut")

    def damage(self, how: Damage, direction: Direction) -> None:
        """The next piece that goes this way."""
        self.armed[direction] = how

    def serve(self) -> None:
        """Until it is closed."""
        while not self.closed:
            now = time.monotonic()
            if now < self.cut_until:
                self.refuse_calls()
            elif not self.listening and self.is_target_there():
                self.accept_calls()
            if now < self.stalled_until:
                time.sleep(TICK_S)
                continue
            for key, _ in self.selector.select(TICK_S):
                if key.fileobj is self.listener:
                    self.take_call()
                elif isinstance(key.fileobj, socket.socket) and key.fileobj in self.other:
                    self.pass_on(key.fileobj)
        self.hang_up(list(self.other))

    def is_target_there(self) -> bool:
        """Whether the real port listens."""
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.target)) == 0

    def accept_calls(self) -> None:
        """From now on."""
        self.listener.listen()
        self.selector.register(self.listener, selectors.EVENT_READ)
        self.listening = True

    def refuse_calls(self) -> None:
        """From now on; open connections end."""
        self.hang_up(list(self.other))
        if self.listening:
            self.selector.unregister(self.listener)
            self.listener.close()
            self.listener = bound(self.port)
            self.listening = False

    def take_call(self) -> None:
        """A new connection, and one to the real port. Between two lives of the learner nobody listens there."""
        near, _ = self.listener.accept()
        try:
            far = socket.create_connection(("127.0.0.1", self.target))
        except OSError:
            near.close()
            return
        self.other |= {near: (far, "to learner"), far: (near, "to actor")}
        for end in (near, far):
            self.selector.register(end, selectors.EVENT_READ)

    def pass_on(self, here: socket.socket) -> None:
        """One piece, perhaps damaged."""
        there, direction = self.other[here]
        try:
            piece = here.recv(PIECE_BYTES)
            time.sleep(self.delay_s)
            there.sendall(self.damaged(piece, direction))
        except OSError:
            piece = b""
        if not piece:
            self.hang_up([here, there])

    def damaged(self, piece: bytes, direction: Direction) -> bytes:
        """What comes out at the other end."""
        how = self.armed.pop(direction, None) if piece else None
        if how is None:
            return piece
        self.done.append(f"{how} {direction}")
        if how == "truncate":
            return piece[: len(piece) // 2]
        place = self.random.randrange(len(piece))
        return piece[:place] + bytes([piece[place] ^ 1 << self.random.randrange(8)]) + piece[place + 1 :]

    def hang_up(self, ends: list[socket.socket]) -> None:
        """Both ends of what these belong to."""
        for end in ends:
            if self.other.pop(end, None):
                self.selector.unregister(end)
                end.close()


def bound(port: int) -> socket.socket:
    """A socket with a port on loopback; 0 takes a free one."""
    found = socket.socket()
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    found.bind(("127.0.0.1", port))
    return found


@contextmanager
def byte_proxy(target: int, seed: int) -> Iterator[ByteProxy]:
    """A proxy that runs for the block."""
    proxy = ByteProxy(target, seed)
    proxy.thread.start()
    try:
        yield proxy
    finally:
        proxy.closed = True
        proxy.thread.join(30)
        proxy.selector.close()
        proxy.listener.close()
