"""A process that stands still says where, and ends.

    open_stacks(path)     from now on SIGUSR1 appends the stack of every thread to this file; so does a wait in vain
    Watchdog.progress()   called wherever work gets on; `limit_s` without a call: stacks to the file, exit code 1

faulthandler does both in C, so they work in an endless loop, and in native code that never gives the interpreter back.
A stopped process does neither until it is continued. Nothing is watched before the first call of `progress`, so loading
takes as long as it takes. Left out on purpose: native frames, and any attempt to go on.

The two ends of the wire under a watchdog: whoever sends or receives gets on.

Heartbeats are sent at points of progress and nowhere else, and every wait receives again and again, so a process that
does neither for `silence_s` hangs. By then its peer has given it up.
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

from protocol.errors import PeerTimeout, ProtocolError
from protocol.messages import AnyMessage
from protocol.transport import ActorPort, LearnerPort
from shared.run import disk
from shared.run.files import disk_errors

ASK = signal.SIGUSR1
"""Asks a process for its stacks."""
FIRED = "Timeout ("
"""What faulthandler writes before the stacks when a watchdog has run out, and at no other time."""
SLACK = 0.1
"""Setting the clock starts a thread; progress is reported with every token. So it is set this share of the limit apart,
and that much is added."""


@contextmanager
def open_stacks(path: Path) -> Iterator[TextIO]:
    """The file that stacks go to; its first line of this life says whose. The watchdog rests before it is closed."""
    with disk_errors(path):
        file = os.fdopen(disk.open_file(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "a")
        print(f"== process {os.getpid()}, started {datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC", file=file, flush=True)
    faulthandler.register(ASK, file=file)
    try:
        yield file
    except PeerTimeout:
        # Nobody can ask a process that has ended.
        traceback.print_exc(file=file)
        raise
    finally:
        faulthandler.unregister(ASK)
        file.close()


class Watchdog:
    """One clock a process."""

    def __init__(self, limit_s: float, stacks: TextIO) -> None:
        self.limit_s = limit_s
        self.stacks = stacks
        self.set_at = -math.inf

    def progress(self) -> None:
        """Start the clock anew."""
        now = time.monotonic()
        if now - self.set_at >= SLACK * self.limit_s:
            self.set_at = now
            faulthandler.dump_traceback_later((1 + SLACK) * self.limit_s, file=self.stacks, exit=True)

    def rest(self) -> None:
        """Stop the clock."""
        self.set_at = -math.inf
        faulthandler.cancel_dump_traceback_later()


class WatchedLearnerPort:
    """A LearnerPort."""

    def __init__(self, port: LearnerPort, watchdog: Watchdog) -> None:
        self.port = port
        self.watchdog = watchdog

    def send(self, peer: bytes, message: AnyMessage) -> None:
        """As the port does."""
        self.watchdog.progress()
        self.port.send(peer, message)

    def receive(self, timeout_s: float) -> tuple[bytes, AnyMessage | ProtocolError] | None:
        """As the port does."""
        self.watchdog.progress()
        return self.port.receive(timeout_s)

    def close(self) -> None:
        """Nothing is watched any more."""
        self.watchdog.rest()
        self.port.close()


class WatchedActorPort:
    """An ActorPort."""

    def __init__(self, port: ActorPort, watchdog: Watchdog) -> None:
        self.port = port
        self.watchdog = watchdog

    def send(self, message: AnyMessage) -> None:
        """As the port does."""
        self.watchdog.progress()
        self.port.send(message)

    def receive(self, timeout_s: float) -> AnyMessage | None:
        """As the port does."""
        self.watchdog.progress()
        return self.port.receive(timeout_s)

    def close(self) -> None:
        """Nothing is watched any more."""
        self.watchdog.rest()
        self.port.close()
