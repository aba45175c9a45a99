"""The errors of this package.

ProtocolError
|-- MalformedMessage    bytes that are not a message of this version: too large, wrong shape, wrong type
|-- WrongVersion        a message of another protocol version
|-- PeerTimeout         a peer sent nothing for too long; names the peer, the awaited message, the seconds
|-- PeerGone            a peer is not connected, no longer reads, or has ended
|-- HandshakeRefused    the learner sent Refused; has its reason
|-- AddressError        a socket cannot listen at its address, or connect to it
`-- SecurityError       a key is missing, readable by others, or not accepted
    `-- NotAccepted     the learner that was meant does not accept this key
"""


class ProtocolError(Exception):
    """Base of every error that this package raises on purpose."""


class MalformedMessage(ProtocolError):
    """The bytes are not a message."""


class WrongVersion(ProtocolError):
    """The message has another protocol version."""


class PeerTimeout(ProtocolError):
    """A peer sent nothing for too long."""

    def __init__(self, peer: str, awaited: str, seconds: float) -> None:
        super().__init__(f"{peer} said nothing for {seconds:.1f} s while {awaited} was awaited.")


class PeerGone(ProtocolError):
    """A peer is not connected, no longer reads, or has ended."""


class HandshakeRefused(ProtocolError):
    """The learner refused this actor."""


class AddressError(ProtocolError):
    """A socket cannot use its address."""


class SecurityError(ProtocolError):
    """A key is missing, readable by others, or not accepted."""


class NotAccepted(SecurityError):
    """The learner knows its own key and does not accept this one."""
