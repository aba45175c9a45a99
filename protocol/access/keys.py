"""CURVE keys, in files that only their owner can read. There is no mode without keys.

    keys/learner.json       {public, secret}                             stays with the learner
    keys/actor0.json        {actor_id, public, secret, learner_public}   all that this actor needs
    keys/allowed/*.json     {actor_id, public, added_at, invited}        a key that the learner accepts

The key identifies the actor: the learner takes an actor's id from the key of its connection, never from a message.
`python -m launch key` makes more keys at any time; removing a file of `allowed/` disconnects its actor from a live run.
Keys are text, 40 characters of Z85. Invitations and revoked keys are in key_list.py. Left out on purpose: expiry of
keys, pass phrases, certificate authorities.
"""

import errno
import os
import re
import stat
import time
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import msgspec
import zmq

from protocol.errors import SecurityError
from protocol.messages import Record

LEARNER = "learner"
ALLOWED = "allowed"
INVITED = "invited"
REVOKED = "revoked"
MAX_FILE_BYTES = 4096
ACTOR_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
HOW_TO_GET_ONE = "make one with `python -m launch key RUN NAME` beside the learner, and copy the run's keys/NAME.json"


class LearnerFile(Record, frozen=True, kw_only=True):
    """Contents of learner.json."""

    public: str
    """Public key; actors connect only to a learner that has it."""
    secret: str
    """Its secret key."""


class ActorFile(Record, frozen=True, kw_only=True):
    """Contents of an actor's file."""

    actor_id: str
    """The actor that has this key."""
    public: str
    """Public key; the learner has it in allowed/."""
    secret: str
    """Its secret key."""
    learner_public: str
    """Public key of the learner; the actor connects to no other."""


class AllowedFile(Record, frozen=True, kw_only=True):
    """Contents of a file in allowed/."""

    actor_id: str
    """The actor that has this key."""
    public: str
    """Its public key."""
    added_at: float = 0.0
    """Unix time from which it is accepted."""
    invited: bool = False
    """Whether the actor made it itself, after an invitation."""


class InvitedFile(Record, frozen=True, kw_only=True):
    """Contents of a file in invited/."""

    actor_id: str
    """The actor that is invited."""
    public: str
    """Public key of the invitation."""
    expires_at: float
    """Unix time until which it is accepted."""


class RevokedFile(Record, frozen=True, kw_only=True):
    """Contents of a file in revoked/."""

    actor_id: str
    """The actor that had this key."""
    public: str
    """Its public key, or that of its invitation."""
    revoked_at: float
    """Unix time."""
    reason: str
    """One sentence."""


AnyFile = TypeVar("AnyFile", LearnerFile, ActorFile, AllowedFile, InvitedFile, RevokedFile)


@dataclass(frozen=True, kw_only=True)
class LearnerKeys:
    """The learner's keys. `repr` does not show the secret."""

    public: bytes
    """Its public key."""
    secret: bytes = field(repr=False)
    """Its secret key."""
    allowed: Path
    """Folder of the accepted keys; read again during the run."""


@dataclass(frozen=True, kw_only=True)
class ActorKey:
    """An actor's keys. `repr` does not show the secret."""

    actor_id: str
    """Name of the actor."""
    public: bytes
    """Its public key."""
    secret: bytes = field(repr=False)
    """Its secret key."""
    learner_public: bytes
    """Public key of its learner."""
    file: Path
    """The file that was read, for error messages."""


def create_keys(keys_dir: Path, actor_ids: Iterable[str] = ("actor0",)) -> None:
    """New keys in a folder that has none. Sets the modes under any umask."""
    public, secret = new_pair()
    for folder in (keys_dir, keys_dir / ALLOWED):
        folder.mkdir(mode=0o700, exist_ok=True)
        close_to_others(folder, 0o700, folder)
    write_new(keys_dir / f"{LEARNER}.json", LearnerFile(public=public, secret=secret))
    for actor_id in actor_ids:
        create_actor_key(keys_dir, actor_id)


def create_actor_key(keys_dir: Path, actor_id: str) -> Path:
    """One more key, accepted at once; returns its file."""
    check_name(keys_dir, actor_id)
    learner = read_key_file(keys_dir / f"{LEARNER}.json", LearnerFile)
    public, secret = new_pair()
    file = keys_dir / f"{actor_id}.json"
    write_new(file, ActorFile(actor_id=actor_id, public=public, secret=secret, learner_public=learner.public))
    # Last, so that the learner never accepts a key whose own file is incomplete.
    with removed_if_it_fails(file):
        accepted = AllowedFile(actor_id=actor_id, public=public, added_at=time.time())
        write_new(keys_dir / ALLOWED / f"{actor_id}.json", accepted)
    return file


def check_name(keys_dir: Path, actor_id: str) -> None:
    """SecurityError for what cannot be the name of a new actor."""
    if not ACTOR_ID.fullmatch(actor_id) or actor_id == LEARNER:
        raise SecurityError(
            f"'{actor_id}' is not a name for an actor; use up to 64 letters, digits, '.', '_' and '-', not '{LEARNER}'."
        )
    if (keys_dir / REVOKED / f"{actor_id}.json").exists():
        raise SecurityError(f"The key of '{actor_id}' was revoked, and a name is used once; choose another name.")
    others = any((keys_dir / folder / f"{actor_id}.json").exists() for folder in (ALLOWED, INVITED))
    if others and not (keys_dir / f"{actor_id}.json").exists():
        raise taken(actor_id)


def taken(actor_id: str) -> SecurityError:
    return SecurityError(f"There is an actor '{actor_id}' already, and a name is used once; choose another name.")


def new_pair() -> Sequence[str]:
    """A public and a secret key."""
    return [key.decode() for key in zmq.curve_keypair()]


def load_learner_keys(keys_dir: Path) -> LearnerKeys:
    """The learner's keys. SecurityError if one of them, or one of the accepted keys, is invalid."""
    check_folder(keys_dir)
    own = read_key_file(keys_dir / f"{LEARNER}.json", LearnerFile)
    check_pair(keys_dir / f"{LEARNER}.json", own)
    check_folder(keys_dir / ALLOWED)
    for fault in read_allowed(keys_dir / ALLOWED).faults.values():
        raise fault
    return LearnerKeys(public=own.public.encode(), secret=own.secret.encode(), allowed=keys_dir / ALLOWED)


@dataclass(frozen=True, kw_only=True)
class Allowed:
    """Contents of `keys/allowed`."""

    actor_ids: dict[str, str]
    """Public key -> actor id."""
    faults: dict[str, SecurityError]
    """What is wrong with the other files, by actor id."""
    unread: frozenset[str]
    """Actor ids of the faults that do not concern the key: the file could not be read."""


def read_allowed(folder: Path) -> Allowed:
    """Read all files of the folder but those of revoked keys. SecurityError if a folder cannot be listed."""
    found: dict[str, str] = {}
    faults: dict[str, SecurityError] = {}
    unread: set[str] = set()
    revoked = {file.name for file in list_key_files(folder.with_name(REVOKED))}
    for file in list_key_files(folder):
        if file.name in revoked:
            continue
        try:
            entry = parse_key_file(file, AllowedFile)
            check_entry(file, entry, found)
        except FileNotFoundError:
            # Removed since the folder was listed.
            continue
        except OSError as error:
            unread.add(file.stem)
            faults[file.stem] = unreadable(file, error)
        except SecurityError as error:
            faults[file.stem] = error
        else:
            found[entry.public] = entry.actor_id
    return Allowed(actor_ids=found, faults=faults, unread=frozenset(unread))


def list_key_files(folder: Path) -> list[Path]:
    """Sorted by name; none if the folder is missing."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise unreadable(folder, error) from error
    return sorted(folder / name for name in names if name.endswith(".json"))


def check_entry(file: Path, entry: AllowedFile, found: dict[str, str]) -> None:
    """SecurityError unless the file has a valid key, the right actor id, and no other file has the key."""
    # is_key() is for secret keys, but libzmq accepts any 32 bytes as one, so it checks public keys too.
    if not is_key(entry.public) or entry.actor_id != file.stem or not ACTOR_ID.fullmatch(entry.actor_id):
        raise malformed(file)
    if entry.public in found:
        raise SecurityError(f"{file} has the key of '{found[entry.public]}'; make a new key for it.")


def load_actor_key(file: Path) -> ActorKey:
    return actor_key(read_key_file(file, ActorFile), file)


def actor_key(content: ActorFile, file: Path) -> ActorKey:
    """SecurityError if the two halves do not belong together. file: for error messages."""
    check_pair(file, content)
    if not is_key(content.learner_public) or not ACTOR_ID.fullmatch(content.actor_id):
        raise malformed(file)
    return ActorKey(
        actor_id=content.actor_id,
        public=content.public.encode(),
        secret=content.secret.encode(),
        learner_public=content.learner_public.encode(),
        file=file,
    )


def write_new(file: Path, content: Record) -> None:
    """Write a new, durable file that is never readable by others."""
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise SecurityError(f"{file} exists; use the key in it, or remove the file to make a new one.") from None
    with removed_if_it_fails(file):
        with open(descriptor, "wb") as stream:
            close_to_others(descriptor, 0o600, file)
            stream.write(msgspec.json.encode(content))
            stream.flush()
            os.fsync(descriptor)
        sync_folder(file.parent)


def close_to_others(opened: Path | int, mode: int, path: Path) -> None:
    """Set the mode. SecurityError if the disk keeps none, as a drive of Windows in WSL. opened: the
    folder, or the descriptor of the file. path: for the message."""
    os.chmod(opened, mode)
    if stat.S_IMODE(os.stat(opened).st_mode) & 0o077:
        raise SecurityError(
            f"{path} can be read by others, since its disk keeps no permissions; choose a run directory on another"
            f" disk, such as --out {os.path.expanduser('~/runs/first')}."
        )


@contextmanager
def removed_if_it_fails(file: Path) -> Generator[None, None, None]:
    """A disk may be full. What it took of a file would stand in the way of another try."""
    try:
        yield
    except BaseException:
        file.unlink(missing_ok=True)
        raise


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_folder(folder: Path) -> None:
    """SecurityError if the folder is missing or others can read or write it."""
    if not folder.is_dir():
        raise SecurityError(f"There is no folder {folder}; restore it from a copy, or start a new run.")
    if stat.S_IMODE(folder.stat().st_mode) & 0o077:
        raise SecurityError(f"The folder {folder} is open to others; run `chmod 700 {folder}`.")


def read_key_file(file: Path, kind: type[AnyFile]) -> AnyFile:
    """Contents of a key file. SecurityError if it is invalid, readable by others, or cannot be read."""
    try:
        return parse_key_file(file, kind)
    except OSError as error:
        raise unreadable(file, error) from error


def parse_key_file(file: Path, kind: type[AnyFile]) -> AnyFile:
    """As `read_key_file`, but raises the OSError of a file that cannot be read."""
    try:
        # Mode and contents of one open file: it cannot be replaced between the two.
        with file.open("rb") as stream:
            if stat.S_IMODE(os.fstat(stream.fileno()).st_mode) & 0o077:
                raise SecurityError(f"The key file {file} can be read by others; run `chmod 600 {file}`.")
            return msgspec.json.decode(stream.read(MAX_FILE_BYTES), type=kind)
    except (ValueError, RecursionError):
        raise malformed(file) from None


def unreadable(path: Path, error: OSError) -> SecurityError:
    """The error for a file or folder that cannot be read; its key may be good."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        remedy = "no descriptor is free: raise the limit (`ulimit -n 1024`)"
    elif error.errno == errno.ENOENT:
        remedy = HOW_TO_GET_ONE
    else:
        remedy = "the key may be good: make the file readable for this process"
    return SecurityError(f"The key file {path} cannot be read ({error.strerror}); {remedy}.")


def check_pair(file: Path, content: LearnerFile | ActorFile) -> None:
    if not is_key(content.secret) or public_half(content.secret) != content.public.encode():
        raise malformed(file)


def malformed(file: Path) -> SecurityError:
    # The message does not quote the content, which may be a secret.
    return SecurityError(f"The key file {file} has no valid key; {HOW_TO_GET_ONE}.")


def is_key(text: str) -> bool:
    try:
        public_half(text)
    except (ValueError, zmq.ZMQError):
        return False
    return True


def public_half(secret: str) -> bytes:
    return zmq.curve_public(secret.encode())
