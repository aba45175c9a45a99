"""Who may join a run: invitations, keys that joined, and revoked ones. Each change is one file that appears whole.

    invite   keys/invited/NAME.json   {actor_id, public, expires_at}           accepted for one message, NewKey
    join     keys/allowed/NAME.json   {actor_id, public, added_at, invited}    then the invitation is removed
    revoke   keys/revoked/NAME.json   {actor_id, public, revoked_at, reason}   then the others are removed
    seen     keys/seen/NAME           empty; its time is when the learner last heard from the actor

The file of the later state decides. An invitation is used up if its name is in allowed/, and no key is accepted whose
name is in revoked/, whatever else is there. So a process may be killed between the two writes of a change: a key is not
lost, and an invitation is not accepted twice. A name is used once, and so is a key.

Expiry is measured with the clock of the learner's machine. Left out on purpose: a lock. Learner and commands write
different files, and the first file of a name wins.
"""

import hashlib
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from protocol.access.keys import (
    ALLOWED,
    INVITED,
    LEARNER,
    REVOKED,
    ActorFile,
    AllowedFile,
    InvitedFile,
    LearnerFile,
    RevokedFile,
    check_name,
    close_to_others,
    is_key,
    list_key_files,
    new_pair,
    parse_key_file,
    read_key_file,
    sync_folder,
    taken,
    write_new,
)
from protocol.errors import SecurityError
from protocol.messages import Record

SEEN = "seen"
FINGERPRINT_DIGITS = 16
State = Literal["invited", "expired", "allowed", "revoked"]
Entry = TypeVar("Entry", AllowedFile, InvitedFile, RevokedFile)


def create_invitation(keys_dir: Path, actor_id: str, expires_at: float) -> ActorFile:
    """Invite an actor. What is returned has the only copy of the invitation's secret key."""
    check_name(keys_dir, actor_id)
    if is_taken(keys_dir, actor_id):
        raise taken(actor_id)
    learner = read_key_file(keys_dir / f"{LEARNER}.json", LearnerFile)
    public, secret = new_pair()
    folder = private_folder(keys_dir / INVITED)
    write_new(folder / f"{actor_id}.json", InvitedFile(actor_id=actor_id, public=public, expires_at=expires_at))
    return ActorFile(actor_id=actor_id, public=public, secret=secret, learner_public=learner.public)


def is_taken(keys_dir: Path, actor_id: str) -> bool:
    return any((keys_dir / folder / f"{actor_id}.json").exists() for folder in ("", ALLOWED, INVITED, REVOKED))


def is_invited(keys_dir: Path, actor_id: str) -> bool:
    """Whether this actor joined by an invitation; True as well if that cannot be read."""
    try:
        return read_key_file(keys_dir / ALLOWED / f"{actor_id}.json", AllowedFile).invited
    except SecurityError:
        return True


def open_invitations(keys_dir: Path, now: float) -> dict[str, str]:
    """Public key -> actor id of each invitation that may be used. SecurityError if a folder cannot be listed."""
    return {
        entry.public: entry.actor_id
        for entry in entries(keys_dir / INVITED, InvitedFile)
        if now <= entry.expires_at and not is_over(keys_dir, entry.actor_id)
    }


def is_over(keys_dir: Path, actor_id: str) -> bool:
    """Whether an invitation was used up, or revoked."""
    return any((keys_dir / folder / f"{actor_id}.json").exists() for folder in (ALLOWED, REVOKED))


def add_key(keys_dir: Path, actor_id: str, public: str, now: float) -> None:
    """Accept the key that an invited actor has made, and use its invitation up. SecurityError for another key than the
    first, for one that the run knows already, or for what is no key. The same key may come again."""
    if not is_key(public):
        raise SecurityError("The NewKey has no valid key; start this actor again.")
    file = keys_dir / ALLOWED / f"{actor_id}.json"
    if (keys_dir / REVOKED / file.name).exists():
        raise SecurityError(f"The invitation of {actor_id} was revoked; ask for a new one.")
    # Of two files with one key the learner takes neither at its next start; and a revoked key stays revoked.
    if any(
        key.public == public and (key.actor_id, key.state) != (actor_id, "allowed") for key in list_keys(keys_dir, now)
    ):
        raise SecurityError(
            f"The NewKey of {actor_id} is no new one: the run has had this key; ask for a new invitation."
        )
    write_whole(file, AllowedFile(actor_id=actor_id, public=public, added_at=now, invited=True))
    if read_key_file(file, AllowedFile).public != public:
        raise SecurityError(f"The invitation of {actor_id} was used already; ask for a new one.")
    remove(keys_dir / INVITED / file.name)


def revoke(keys_dir: Path, actor_id: str, reason: str, now: float) -> None:
    """Accept no key of this actor any more. SecurityError if there is no such actor."""
    name = f"{actor_id}.json"
    if (keys_dir / REVOKED / name).exists():
        raise SecurityError(f"The key of '{actor_id}' is revoked already.")
    public = public_of(keys_dir, actor_id)
    content = RevokedFile(actor_id=actor_id, public=public, revoked_at=now, reason=reason)
    write_whole(private_folder(keys_dir / REVOKED) / name, content)
    for folder in (INVITED, ALLOWED):
        remove(keys_dir / folder / name)


def public_of(keys_dir: Path, actor_id: str) -> str:
    """Of its key, or of its invitation."""
    for key in list_keys(keys_dir, now=0.0):
        if key.actor_id == actor_id and key.state != "revoked":
            return key.public
    known = sorted({key.actor_id for key in list_keys(keys_dir, now=0.0) if key.state != "revoked"})
    raise SecurityError(f"There is no key of '{actor_id}' to revoke; the run has {', '.join(known) or 'none'}.")


@dataclass(frozen=True, kw_only=True)
class ListedKey:
    """A key of a run, for people."""

    actor_id: str
    """Whose it is."""
    public: str
    """Public key."""
    state: State
    """What the learner does with it."""
    at: float
    """Unix time: when it was added or revoked, or when its invitation expires."""
    invited: bool = False
    """Whether its actor joined by an invitation."""
    seen_at: float | None = None
    """Unix time when the learner last heard from it; None if it never did."""
    reason: str = ""
    """Why it was revoked."""

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.public)


def fingerprint(public: str) -> str:
    """Short enough to read out, too long to be met by chance."""
    return hashlib.sha256(public.encode()).hexdigest()[:FINGERPRINT_DIGITS]


def list_keys(keys_dir: Path, now: float) -> list[ListedKey]:
    """Every key and invitation, by the name of its actor. Files that cannot be read are left out."""
    found: list[ListedKey] = []
    for gone in entries(keys_dir / REVOKED, RevokedFile):
        at, reason = gone.revoked_at, gone.reason
        found.append(ListedKey(actor_id=gone.actor_id, public=gone.public, state="revoked", at=at, reason=reason))
    over = {key.actor_id for key in found}
    for key in entries(keys_dir / ALLOWED, AllowedFile):
        if key.actor_id not in over:
            name, seen = key.actor_id, seen_at(keys_dir, key.actor_id)
            found.append(
                ListedKey(
                    actor_id=name,
                    public=key.public,
                    state="allowed",
                    at=key.added_at,
                    invited=key.invited,
                    seen_at=seen,
                )
            )
    over = {key.actor_id for key in found}
    for one in entries(keys_dir / INVITED, InvitedFile):
        if one.actor_id not in over:
            state = "invited" if now <= one.expires_at else "expired"
            found.append(ListedKey(actor_id=one.actor_id, public=one.public, state=state, at=one.expires_at))
    return sorted(found, key=lambda key: key.actor_id)


def entries(folder: Path, kind: type[Entry]) -> Iterator[Entry]:
    """The valid files of a folder. SecurityError if it cannot be listed."""
    for file in list_key_files(folder):
        with suppress(SecurityError, OSError):
            entry = parse_key_file(file, kind)
            if entry.actor_id == file.stem:
                yield entry


def mark_seen(keys_dir: Path, actor_id: str) -> None:
    """The learner has heard from this actor now."""
    file = private_folder(keys_dir / SEEN) / actor_id
    os.close(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
    os.utime(file)


def seen_at(keys_dir: Path, actor_id: str) -> float | None:
    try:
        return (keys_dir / SEEN / actor_id).stat().st_mtime
    except OSError:
        return None


def private_folder(folder: Path) -> Path:
    """The folder, which only its owner may enter; made if it is missing."""
    if not folder.is_dir():
        folder.mkdir(mode=0o700, exist_ok=True)
        close_to_others(folder, 0o700, folder)
        sync_folder(folder.parent)
    return folder


def write_whole(file: Path, content: Record) -> None:
    """Write a new file that is complete as soon as it has its name. A file that is there stays."""
    if file.exists():
        return
    # A name of its own: a command may write the same file at the same time as the learner.
    new = file.with_name(f"{file.stem}.{secrets.token_hex(8)}.new")
    write_new(new, content)
    try:
        with suppress(FileExistsError):
            os.link(new, file)
        sync_folder(file.parent)
    finally:
        remove(new)


def remove(file: Path) -> None:
    """Durably, if it is there."""
    with suppress(FileNotFoundError):
        file.unlink()
        sync_folder(file.parent)


def utc(at: float) -> str:
    """For people."""
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(at))
