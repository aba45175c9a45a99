"""Whom the learner lets in: the keys in `keys/allowed`, as they lie there now, less whoever is shut out.

The folder is read again at every handshake and once a second, so that a new key works at once and a key that was
removed stops working within the second. A file that is spoilt while the run goes on counts as absent. Two threads ask:
the one that answers handshakes, and the port's own; what they share is replaced as a whole.
"""

import time
from pathlib import Path

from protocol.conduct import Conduct
from protocol.limits import COST_BYTES, HANDSHAKE_COST
from protocol.security import read_allowed
from protocol.tally import Tally

ZAP_DOMAIN = "tandem"
READ_EVERY_S = 1.0


class AllowList:
    """Public key -> actor id."""

    def __init__(self, folder: Path, conduct: Conduct, tally: Tally) -> None:
        self.folder = folder
        self.conduct = conduct
        self.tally = tally
        self.read()

    def read(self) -> None:
        """Look into the folder."""
        self.actor_ids, faults = read_allowed(self.folder)
        self.read_at = time.monotonic()
        for fault in faults:
            self.tally.note("ignored a file of the allow-list", str(fault))

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether a peer that has proved to own this key may come in; called for every handshake."""
        self.read()
        actor_id = self.actor_ids.get(key.decode())
        if actor_id is None:
            self.tally.note("refused a connection: its key is not in keys/allowed", f"public half {key.decode()}")
        elif self.conduct.is_shut_out(actor_id):
            self.tally.note("refused a connection: its actor is shut out for a while", actor_id)
        elif not self.conduct.spend(actor_id, HANDSHAKE_COST * COST_BYTES):
            self.tally.note("refused a connection: its actor makes too many", actor_id)
        else:
            return domain == ZAP_DOMAIN
        return False

    def actor_id(self, user_id: object) -> str | None:
        """Who owns this key, if it is still allowed."""
        self.refresh()
        return self.actor_ids.get(user_id) if isinstance(user_id, str) else None

    def allows(self, actor_id: str) -> bool:
        """Whether this actor may be spoken to."""
        self.refresh()
        return actor_id in self.actor_ids.values() and not self.conduct.is_shut_out(actor_id)

    def refresh(self) -> None:
        """Not at every message."""
        if time.monotonic() - self.read_at > READ_EVERY_S:
            self.read()
