"""Whom the learner lets in: the keys in `keys/allowed`, as they lie there now, less whoever is shut out.

The folder is read again at every handshake and once a second, so that a new key works at once and a key that was
removed stops working within the second. A file that is spoilt while the run goes on counts as absent. One that the disk
does not give (no descriptor left, a fault) says nothing of its key, which stays as it was read last; so do all of them
while the folder cannot be listed. Two threads ask: the one that answers handshakes, and the port's own; what they share
is replaced as a whole.
"""

import time
from pathlib import Path

from protocol.access.allowance import Conduct
from protocol.access.keys import read_allowed
from protocol.access.sparse_log import Tally
from protocol.errors import SecurityError
from protocol.limits import COST_BYTES, HANDSHAKE_COST

ZAP_DOMAIN = "tandem"
READ_EVERY_S = 1.0


class AllowList:
    """Public key -> actor id."""

    def __init__(self, folder: Path, conduct: Conduct, tally: Tally) -> None:
        self.folder = folder
        self.conduct = conduct
        self.tally = tally
        self.actor_ids: dict[str, str] = {}
        self.read()

    def read(self) -> None:
        """Look into the folder."""
        self.read_at = time.monotonic()
        try:
            found = read_allowed(self.folder)
        except SecurityError as error:
            self.tally.note("kept the allow-list as it was", str(error))
            return
        kept = {key: actor_id for key, actor_id in self.actor_ids.items() if actor_id in found.unread}
        self.actor_ids = kept | found.actor_ids
        for actor_id, fault in found.faults.items():
            what = "kept a key as it was" if actor_id in found.unread else "ignored a file of the allow-list"
            self.tally.note(what, str(fault))

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether a peer that has proved to own this key may come in; called for every handshake. What it raised would
        end the thread that calls it, and with it every later handshake."""
        try:
            return self.lets_in(domain, key)
        except Exception as error:
            self.tally.note("refused a connection: its key could not be looked up", repr(error))
            return False

    def lets_in(self, domain: str, key: bytes) -> bool:
        """As the folder is now."""
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
