"""Who may speak: CURVE keys in files that only their owner can read. On by default; there is no way to switch it off.

    keys/learner.json       {public, secret}                             stays with the learner
    keys/actor0.json        {actor_id, public, secret, learner_public}   what this actor needs, here or elsewhere
    keys/allowed/*.json     {actor_id, public}                           whom the learner lets in, a file an actor

An actor is its key: the learner takes an actor's id from the key that was proved, never from what the actor says. More
keys are made at any time with `python -m launch key`; removing a file of `allowed/` shuts its actor out of a live run.
Keys are text, 40 characters of Z85. Left out on purpose: expiry, pass phrases, certificates of an authority.
"""

import errno
import os
import re
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import msgspec
import zmq

from protocol.errors import SecurityError
from protocol.messages import Record

LEARNER = "learner"
ALLOWED = "allowed"
MAX_FILE_BYTES = 4096
ACTOR_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
HOW_TO_GET_ONE = "make one with `python -m launch key RUN NAME` beside the learner, and copy the run's keys/NAME.json"


class LearnerFile(Record, frozen=True, kw_only=True):
    """Contents of learner.json."""

    public: str
    """Key that actors expect the learner to have."""
    secret: str
    """Its other half."""


class ActorFile(Record, frozen=True, kw_only=True):
    """Contents of an actor's file."""

    actor_id: str
    """Whom the learner takes the holder for."""
    public: str
    """Key that the learner lets in."""
    secret: str
    """Its other half."""
    learner_public: str
    """Key that the learner must prove to have."""


class AllowedFile(Record, frozen=True, kw_only=True):
    """Contents of a file in allowed/."""

    actor_id: str
    """Who comes in with this key."""
    public: str
    """The key."""


AnyFile = TypeVar("AnyFile", LearnerFile, ActorFile, AllowedFile)


@dataclass(frozen=True, kw_only=True)
class LearnerKeys:
    """What the learner needs. The secret is not shown when this is printed."""

    public: bytes
    """Its own key."""
    secret: bytes = field(repr=False)
    """The other half."""
    allowed: Path
    """Folder of the keys it lets in; looked into again while the run goes on."""


@dataclass(frozen=True, kw_only=True)
class ActorKey:
    """What an actor needs. The secret is not shown when this is printed."""

    actor_id: str
    """Who it is."""
    public: bytes
    """Its own key."""
    secret: bytes = field(repr=False)
    """The other half."""
    learner_public: bytes
    """The key of the learner it is willing to talk to."""
    file: Path
    """Where it came from, for messages."""


def create_keys(keys_dir: Path, actor_ids: Iterable[str] = ("actor0",)) -> None:
    """New keys in this folder, which holds none yet. Modes are set, not left to the umask."""
    public, secret = new_pair()
    for folder in (keys_dir, keys_dir / ALLOWED):
        folder.mkdir(mode=0o700, exist_ok=True)
        folder.chmod(0o700)
    write_new(keys_dir / f"{LEARNER}.json", LearnerFile(public=public, secret=secret))
    for actor_id in actor_ids:
        create_actor_key(keys_dir, actor_id)


def create_actor_key(keys_dir: Path, actor_id: str) -> Path:
    """One more key, allowed at once; returns its file. The public half comes last: then the key is whole."""
    if not ACTOR_ID.fullmatch(actor_id) or actor_id == LEARNER:
        raise SecurityError(
            f"'{actor_id}' is no name for an actor; use up to 64 letters, digits, '.', '_' and '-', not '{LEARNER}'."
        )
    learner = read_key_file(keys_dir / f"{LEARNER}.json", LearnerFile)
    public, secret = new_pair()
    file = keys_dir / f"{actor_id}.json"
    write_new(file, ActorFile(actor_id=actor_id, public=public, secret=secret, learner_public=learner.public))
    write_new(keys_dir / ALLOWED / f"{actor_id}.json", AllowedFile(actor_id=actor_id, public=public))
    return file


def new_pair() -> Sequence[str]:
    """A public key and its secret half."""
    return [key.decode() for key in zmq.curve_keypair()]


def load_learner_keys(keys_dir: Path) -> LearnerKeys:
    """The learner's key, and where the keys lie that it lets in; all of them are looked at now."""
    check_folder(keys_dir)
    own = read_key_file(keys_dir / f"{LEARNER}.json", LearnerFile)
    check_pair(keys_dir / f"{LEARNER}.json", own)
    check_folder(keys_dir / ALLOWED)
    for fault in read_allowed(keys_dir / ALLOWED).faults.values():
        raise fault
    return LearnerKeys(public=own.public.encode(), secret=own.secret.encode(), allowed=keys_dir / ALLOWED)


@dataclass(frozen=True, kw_only=True)
class Allowed:
    """What a look into `keys/allowed` has found."""

    actor_ids: dict[str, str]
    """Public key -> actor id."""
    faults: dict[str, SecurityError]
    """By actor id, what is wrong with the files that are not among them."""
    unread: frozenset[str]
    """Those of `faults` that say nothing about the key: the disk did not give the file."""


def read_allowed(folder: Path) -> Allowed:
    """All files of the folder. A file that has gone meanwhile is absent. SecurityError if there is no looking in."""
    found: dict[str, str] = {}
    faults: dict[str, SecurityError] = {}
    unread: set[str] = set()
    for file in list_key_files(folder):
        try:
            entry = parse_key_file(file, AllowedFile)
            check_entry(file, entry, found)
        except FileNotFoundError:
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
    """By name. A folder that is not there holds none."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise unreadable(folder, error) from error
    return sorted(folder / name for name in names if name.endswith(".json"))


def check_entry(file: Path, entry: AllowedFile, found: dict[str, str]) -> None:
    """A key under the name of its file, and under no other."""
    # libzmq takes any 32 bytes for a secret key, so it judges public ones too.
    if not is_key(entry.public) or entry.actor_id != file.stem or not ACTOR_ID.fullmatch(entry.actor_id):
        raise malformed(file)
    if entry.public in found:
        raise SecurityError(f"{file} allows the key of '{found[entry.public]}' again; make it a key of its own.")


def load_actor_key(file: Path) -> ActorKey:
    """An actor's key."""
    content = read_key_file(file, ActorFile)
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


def write_new(file: Path, content: LearnerFile | ActorFile | AllowedFile) -> None:
    """A new file, durably, that nobody else could read at any moment."""
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise SecurityError(f"{file} exists; use the key there, or remove it to have a new one.") from None
    with open(descriptor, "wb") as stream:
        os.fchmod(descriptor, 0o600)
        stream.write(msgspec.json.encode(content))
        stream.flush()
        os.fsync(descriptor)
    sync_folder(file.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in it durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_folder(folder: Path) -> None:
    """Nobody else may look into it, or lay another key there."""
    if not folder.is_dir():
        raise SecurityError(f"There is no folder {folder}; restore it from a copy, or begin a new run.")
    if stat.S_IMODE(folder.stat().st_mode) & 0o077:
        raise SecurityError(f"The folder {folder} is open to others; run `chmod 700 {folder}`.")


def read_key_file(file: Path, kind: type[AnyFile]) -> AnyFile:
    """Contents of a key file, if nobody else can read it."""
    try:
        return parse_key_file(file, kind)
    except OSError as error:
        raise unreadable(file, error) from error


def parse_key_file(file: Path, kind: type[AnyFile]) -> AnyFile:
    """As `read_key_file`, but what the disk says is left as it is. Mode and contents come from one open file."""
    try:
        with file.open("rb") as stream:
            if stat.S_IMODE(os.fstat(stream.fileno()).st_mode) & 0o077:
                raise SecurityError(f"The key file {file} can be read by others; run `chmod 600 {file}`.")
            return msgspec.json.decode(stream.read(MAX_FILE_BYTES), type=kind)
    except (ValueError, RecursionError):
        raise malformed(file) from None


def unreadable(path: Path, error: OSError) -> SecurityError:
    """A file that is there and cannot be read may hold a good key."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        remedy = "no descriptor is free: raise their number (`ulimit -n 1024`)"
    elif error.errno == errno.ENOENT:
        remedy = HOW_TO_GET_ONE
    else:
        remedy = "the key may be good: see to it that this process can read the file"
    return SecurityError(f"The key file {path} cannot be read ({error.strerror}); {remedy}.")


def check_pair(file: Path, content: LearnerFile | ActorFile) -> None:
    """Two halves of one key."""
    if not is_key(content.secret) or public_half(content.secret) != content.public.encode():
        raise malformed(file)


def malformed(file: Path) -> SecurityError:
    """Says nothing of what was found, for it may be a secret."""
    return SecurityError(f"The key file {file} does not hold a key; {HOW_TO_GET_ONE}.")


def is_key(text: str) -> bool:
    """Forty characters of Z85."""
    try:
        public_half(text)
    except (ValueError, zmq.ZMQError):
        return False
    return True


def public_half(secret: str) -> bytes:
    """The public key that belongs to a secret one."""
    return zmq.curve_public(secret.encode())
