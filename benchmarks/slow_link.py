"""A bad network between two namespaces: every packet comes later, some never, and now and then all are lost.

    outer device (TUN) <-> this thread <-> inner device (TUN, moved into a namespace)

Packets are those of the kernel's own TCP, which does not know of the thread. Both directions are treated alike, and the
order of packets is kept. Left out on purpose: the kernel's `tc netem`, which not every kernel has.
"""

import fcntl
import os
import random
import select
import struct
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from heapq import heappop, heappush

TUN = "/dev/net/tun"
TUNSETIFF = 0x400454CA
IFF_TUN, IFF_NO_PI = 0x0001, 0x1000
MOST_BYTES = 65_536
MOST_WAITING = 10_000
"""Packets on their way in one direction; further ones are dropped, as by a full queue."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """What packets go through, each way."""

    delay_s: float = 0.005
    jitter_s: float = 0.001
    """The delay is between delay_s - jitter_s and delay_s + jitter_s."""
    loss: float = 0.01
    """Share of packets."""


class SlowLink:
    """Two devices and the thread between them. They vanish when it is closed, or when the process ends."""

    def __init__(self, outer: str, inner: str, line: Line, seed: int) -> None:
        self.line = line
        self.rng = random.Random(seed)
        self.is_cut = False
        self.packets: Counter[str] = Counter()
        self.waiting: list[tuple[float, int, int, bytes]] = []
        """A heap: when it is due, its number, the end that it leaves by, and the packet."""
        self.due = [0.0, 0.0]
        self.ends = [open_device(outer)]
        try:
            self.ends.append(open_device(inner))
            self.stop, self.stopped = os.pipe()
        except OSError:
            os.close(self.ends[0])
            raise
        self.thread = threading.Thread(target=self.carry, daemon=True)
        self.thread.start()

    def carry(self) -> None:
        while True:
            wait_s = max(0.0, self.waiting[0][0] - time.monotonic()) if self.waiting else None
            ready, _, _ = select.select([*self.ends, self.stop], [], [], wait_s)
            if self.stop in ready:
                return
            for fd in ready:
                self.take(fd)
            while self.waiting and self.waiting[0][0] <= time.monotonic():
                _, _, end, packet = heappop(self.waiting)
                # The device of the other end may be down or gone.
                with suppress(OSError):
                    os.write(self.ends[end], packet)

    def take(self, fd: int) -> None:
        """A packet has left one end."""
        with suppress(OSError):
            packet, end = os.read(fd, MOST_BYTES), 1 - self.ends.index(fd)
            if self.is_cut or self.rng.random() < self.line.loss or len(self.waiting) > MOST_WAITING:
                self.packets["cut off" if self.is_cut else "lost"] += 1
                return
            self.packets["carried"] += 1
            drawn = self.line.delay_s + self.rng.uniform(-self.line.jitter_s, self.line.jitter_s)
            self.due[end] = max(self.due[end], time.monotonic() + drawn)
            heappush(self.waiting, (self.due[end], self.packets["carried"], end, packet))

    def close(self) -> None:
        os.close(self.stopped)
        self.thread.join()
        for fd in (*self.ends, self.stop):
            os.close(fd)


def open_device(name: str) -> int:
    """A TUN device of this name, in this namespace; it may be moved to another one."""
    fd = os.open(TUN, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI))
    except OSError:
        os.close(fd)
        raise
    return fd
