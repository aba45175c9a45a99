"""What can go wrong on the wire.

ProtocolError
|-- MalformedMessage    bytes that are not a message of this version: too large, wrong shape, wrong type
|-- VersionMismatch     a message of another protocol version
|-- PeerTimeout         a peer was silent for longer than agreed; names peer, what was awaited, seconds
|-- PeerGone            a peer was addressed that is not connected, or takes nothing any more
|-- HandshakeRefused    the learner said Refused; carries its sentence
`-- SecurityError       a key is missing, readable by others, or not accepted
"""


class ProtocolError(Exception):
    """Base of everything this package raises on purpose."""


class MalformedMessage(ProtocolError):
    """Bytes that do not form a message."""


class VersionMismatch(ProtocolError):
    """A message that names another protocol version."""


class PeerTimeout(ProtocolError):
    """A peer said nothing for too long."""

    def __init__(self, peer: str, awaited: str, seconds: float) -> None:
        super().__init__(f"{peer} said nothing for {seconds:.1f} s while {awaited} was awaited.")


class PeerGone(ProtocolError):
    """A peer was addressed that is not connected, or takes nothing any more."""


class HandshakeRefused(ProtocolError):
    """The learner refused this actor."""


class SecurityError(ProtocolError):
    """A key is missing, exposed or not accepted."""
