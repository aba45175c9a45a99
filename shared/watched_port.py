"""The two ends of the wire under a watchdog: whoever sends or receives gets on.

Heartbeats are sent at points of progress and nowhere else, and every wait receives again and again, so a process that
does neither for `silence_s` hangs. By then its peer has given it up.
"""

from protocol.errors import ProtocolError
from protocol.messages import AnyMessage
from protocol.transport import ActorPort, LearnerPort
from shared.watchdog import Watchdog


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
