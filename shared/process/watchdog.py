"""Ends a process that makes no progress, after it has written its stacks.

    open_stacks(path)     from now on SIGUSR1 appends the stack of every thread to this file; so does a PeerTimeout
    Watchdog.progress()   called wherever work makes progress. `limit_s` without a call: stacks to the file, exit code 1

faulthandler does both in C, so they also work in an endless loop and in native code that never returns to the
interpreter. A stopped process does neither until it is continued. Nothing is watched before the first call of
`progress`, so loading may take any time. Left out on purpose: native frames, and any attempt to continue.

WatchedLearnerPort and WatchedActorPort count every send and receive as progress. Heartbeats are sent only where work
makes progress, and every wait receives repeatedly, so a process that does neither for `silence_s` hangs. By then its
peer has stopped waiting.
"""

import faulthandler
import math
import os
import signal
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

from protocol.errors import PeerTimeout
from protocol.messages import AnyMessage
from protocol.transport import ActorPort, Inbound, LearnerPort
from shared.run import disk
from shared.run.files import disk_errors

ASK = signal.SIGUSR1
"""Asks a process for its stacks."""
FIRED = "Timeout ("
"""What faulthandler writes before the stacks when the time limit has passed, and never otherwise."""
SLACK = 0.1
"""Setting the timer starts a thread, and progress is reported with every token. So the timer is set again only after
this share of the limit, and the limit is longer by the same share."""


@contextmanager
def open_stacks(path: Path) -> Iterator[TextIO]:
    """The file for stacks; it starts with a line about this process. Call Watchdog.rest before leaving the block."""
    with disk_errors(path):
        file = os.fdopen(disk.open_file(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "a")
        print(f"== process {os.getpid()}, started {datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC", file=file, flush=True)
    faulthandler.register(ASK, file=file)
    try:
        yield file
    except PeerTimeout:
        # The launcher cannot ask for stacks once this process has ended.
        traceback.print_exc(file=file)
        raise
    finally:
        faulthandler.unregister(ASK)
        file.close()


class Watchdog:
    """One timer per process."""

    def __init__(self, limit_s: float, stacks: TextIO) -> None:
        self.limit_s = limit_s
        self.stacks = stacks
        self.set_at = -math.inf

    def progress(self) -> None:
        now = time.monotonic()
        if now - self.set_at >= SLACK * self.limit_s:
            self.set_at = now
            faulthandler.dump_traceback_later((1 + SLACK) * self.limit_s, file=self.stacks, exit=True)

    def rest(self) -> None:
        self.set_at = -math.inf
        faulthandler.cancel_dump_traceback_later()


class WatchedLearnerPort:
    """A LearnerPort that reports progress."""

    def __init__(self, port: LearnerPort, watchdog: Watchdog) -> None:
        self.port = port
        self.watchdog = watchdog

    def send(self, peer: bytes, message: AnyMessage) -> None:
        self.watchdog.progress()
        self.port.send(peer, message)

    def receive(self, timeout_s: float) -> Inbound | None:
        self.watchdog.progress()
        return self.port.receive(timeout_s)

    def close(self) -> None:
        self.watchdog.rest()
        self.port.close()


class WatchedActorPort:
    """An ActorPort that reports progress."""

    def __init__(self, port: ActorPort, watchdog: Watchdog) -> None:
        self.port = port
        self.watchdog = watchdog

    def send(self, message: AnyMessage) -> None:
        self.watchdog.progress()
        self.port.send(message)

    def receive(self, timeout_s: float) -> AnyMessage | None:
        self.watchdog.progress()
        return self.port.receive(timeout_s)

    def bytes_received(self) -> int:
        return self.port.bytes_received()

    def close(self) -> None:
        self.watchdog.rest()
        self.port.close()
