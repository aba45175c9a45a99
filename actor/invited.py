"""Joining by an invitation: the actor makes its own key pair, and the learner accepts that instead of the invitation.

    make a pair, on this disk -> connect with the invitation's key -> NewKey -> KeyAdded -> connect with the own key

The invitation works once, the actor's own key from then on: the same command joins again after a restart. An actor
that was killed, or lost the reply, finds the invitation used. If the learner accepts its own key, all is well.
"""

import os
import time

from protocol.access.key_list import utc
from protocol.access.keys import ActorKey, load_actor_key, sync_folder
from protocol.errors import HandshakeRefused, NotAccepted, PeerTimeout
from protocol.messages import KeyAdded, NewKey, Refused
from protocol.transport import ZmqActorPort
from shared.process.invitation import Accepted

SEND_EVERY_S = 5.0
LOOK_EVERY_S = 0.2


def join(accepted: Accepted, silence_s: float) -> ActorKey:
    """The actor's own key, which the learner accepts. SecurityError if the invitation is not open any more."""
    if not accepted.key.exists():
        own = load_actor_key(accepted.unconfirmed)
        try:
            add_key(accepted.endpoint, accepted.invitation, own.public.decode(), silence_s)
        except NotAccepted:
            if not is_accepted(accepted.endpoint, own, silence_s):
                raise NotAccepted(why_not(accepted)) from None
        os.rename(accepted.unconfirmed, accepted.key)
        sync_folder(accepted.key.parent)
    return load_actor_key(accepted.key)


def add_key(endpoint: str, invitation: ActorKey, public: str, silence_s: float) -> None:
    """Send the key until the learner has added it."""
    port = ZmqActorPort(endpoint, invitation, silence_s=silence_s)
    deadline = time.monotonic() + silence_s
    try:
        while time.monotonic() < deadline:
            port.send(NewKey(public=public))
            reply = port.receive(min(SEND_EVERY_S, silence_s))
            if isinstance(reply, KeyAdded):
                return
            if isinstance(reply, Refused):
                raise HandshakeRefused(reply.reason)
        raise PeerTimeout(f"The learner at {endpoint}", "the reply to an invitation", silence_s)
    finally:
        port.close()


def is_accepted(endpoint: str, key: ActorKey, silence_s: float) -> bool:
    """Whether the learner lets this key connect."""
    port = ZmqActorPort(endpoint, key, silence_s=silence_s)
    deadline = time.monotonic() + silence_s
    try:
        while time.monotonic() < deadline:
            port.receive(LOOK_EVERY_S)
            if port.watch.has_succeeded:
                return True
        raise PeerTimeout(f"The learner at {endpoint}", "a handshake", silence_s)
    except NotAccepted:
        return False
    finally:
        port.close()


def why_not(accepted: Accepted) -> str:
    name = accepted.invitation.actor_id
    is_late = time.time() > accepted.expires_at
    why = f"it expired at {utc(accepted.expires_at)}" if is_late else "it was used already, or revoked"
    return (
        f"The learner at {accepted.endpoint} does not accept the invitation of {name}: {why}. Ask for a new one"
        f" (`python -m launch invite RUN`); if nobody you know used this one, revoke it there"
        f" (`python -m launch keys RUN --revoke {name}`)."
    )
