"""Which keys the learner accepts: those in `keys/allowed` at this moment, except those of banned or revoked actors. The
key of an open invitation is accepted too, for adding one (key_list.py).

The folder is read again at every handshake and at most once a second in between. So a new key works at once, and a
removed key stops working within a second. A file that became invalid during the run counts as removed. A file that
cannot be read (no free descriptor, a disk error) proves nothing about its key, so that key keeps its last state; if the
folder cannot be listed, all keys do. Two threads use this: the authenticator and the thread of the port. They share one
dict, which is replaced and never changed.
"""

import logging
import math
import time
from contextlib import suppress
from pathlib import Path

from protocol.access.allowance import Allowances
from protocol.access.key_list import add_key, fingerprint, mark_seen, open_invitations
from protocol.access.keys import read_allowed
from protocol.access.sparse_log import SparseLog
from protocol.errors import SecurityError
from protocol.limits import COST_BYTES, HANDSHAKE_COST

ZAP_DOMAIN = "tandem"
READ_EVERY_S = 1.0
SEEN_EVERY_S = 10.0


class AllowList:
    """Public key -> actor id."""

    def __init__(self, folder: Path, allowances: Allowances, sparse_log: SparseLog) -> None:
        self.folder = folder
        self.allowances = allowances
        self.sparse_log = sparse_log
        self.actor_ids: dict[str, str] = {}
        self.invitations: dict[str, str] = {}
        self.seen_at: dict[str, float] = {}
        self.read()

    def read(self) -> None:
        self.read_at = time.monotonic()
        try:
            found = read_allowed(self.folder)
            invitations = open_invitations(self.folder.parent, time.time())
        except SecurityError as error:
            self.sparse_log.note("kept the allow-list as it was", str(error))
            return
        kept = {key: actor_id for key, actor_id in self.actor_ids.items() if actor_id in found.unread}
        self.actor_ids = kept | found.actor_ids
        self.invitations = invitations
        for actor_id, fault in found.faults.items():
            what = "kept a key as it was" if actor_id in found.unread else "ignored a file of the allow-list"
            self.sparse_log.note(what, str(fault))

    def callback(self, domain: str, key: bytes) -> bool:
        """pyzmq calls this at every handshake, after the peer has shown that it owns this key: may it connect?"""
        try:
            return self.accepts(domain, key)
        except Exception as error:
            # An exception here would end the thread of the authenticator, and every later handshake would fail.
            self.sparse_log.note("refused a connection: its key could not be looked up", repr(error))
            return False

    def accepts(self, domain: str, key: bytes) -> bool:
        self.read()
        public = key.decode()
        actor_id = self.actor_ids.get(public) or self.invitations.get(public)
        if actor_id is None:
            self.sparse_log.note("refused a connection: its key is not in keys/allowed", f"public key {public}")
        elif self.allowances.is_banned(actor_id):
            self.sparse_log.note("refused a connection: its actor is banned for a while", actor_id)
        elif not self.allowances.spend(actor_id, HANDSHAKE_COST * COST_BYTES):
            self.sparse_log.note("refused a connection: its actor connects too often", actor_id)
        else:
            return domain == ZAP_DOMAIN
        return False

    def actor_id(self, user_id: object) -> str | None:
        """The actor that owns this key, or None if the key is no longer allowed."""
        self.refresh()
        return self.actor_ids.get(user_id) if isinstance(user_id, str) else None

    def invited_id(self, user_id: object) -> str | None:
        """The actor whose open invitation has this key. Call `actor_id` before."""
        return self.invitations.get(user_id) if isinstance(user_id, str) else None

    def add_key(self, actor_id: str, public: str) -> None:
        """In place of the actor's invitation. SecurityError if that is not possible."""
        try:
            add_key(self.folder.parent, actor_id, public, time.time())
        except OSError as error:
            raise SecurityError(f"The learner cannot write the key of {actor_id} ({error.strerror}).") from error
        self.read()
        self.sparse_log.note(f"added the key of {actor_id}", f"fingerprint {fingerprint(public)}", logging.INFO)

    def saw(self, actor_id: str) -> None:
        """Note that this actor was heard. Its file is for people, so a disk that does not take it stops nothing."""
        now = time.monotonic()
        if now - self.seen_at.get(actor_id, -math.inf) > SEEN_EVERY_S:
            self.seen_at[actor_id] = now
            with suppress(OSError):
                mark_seen(self.folder.parent, actor_id)

    def allows(self, actor_id: str) -> bool:
        """Whether this actor may receive messages."""
        self.refresh()
        return actor_id in self.actor_ids.values() and not self.allowances.is_banned(actor_id)

    def refresh(self) -> None:
        # Not at every message: reading the folder costs more than a message.
        if time.monotonic() - self.read_at > READ_EVERY_S:
            self.read()
