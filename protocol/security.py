"""Who may speak: CURVE keys in files that only their owner can read. On by default; there is no way to switch it off.

    keys/learner.json   {public, secret}                   stays with the learner
    keys/actor.json     {public, secret, learner_public}   is what an actor needs, here or on another machine

All actors of a run share one key, and it is the only one the learner lets in. Keys are text, 40 characters of Z85.
Left out on purpose: a list of allowed keys, expiry, pass phrases. Who must be shut out gets a run with new keys.
"""

import os
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import msgspec
import zmq

from protocol.errors import SecurityError
from protocol.messages import Record

LEARNER_FILE = "learner.json"
ACTOR_FILE = "actor.json"
MAX_FILE_BYTES = 4096


class LearnerFile(Record, frozen=True, kw_only=True):
    """Contents of learner.json."""

    public: str
    """Key that actors expect the learner to have."""
    secret: str
    """Its other half."""


class ActorFile(Record, frozen=True, kw_only=True):
    """Contents of actor.json."""

    public: str
    """Key that the learner lets in."""
    secret: str
    """Its other half."""
    learner_public: str
    """Key that the learner must prove to have."""


AnyFile = TypeVar("AnyFile", LearnerFile, ActorFile)


@dataclass(frozen=True, kw_only=True)
class LearnerKeys:
    """What the learner needs. The secret is not shown when this is printed."""

    public: bytes
    """Its own key."""
    secret: bytes = field(repr=False)
    """The other half."""
    actor_public: bytes
    """The one key it lets in."""


@dataclass(frozen=True, kw_only=True)
class ActorKey:
    """What an actor needs. The secret is not shown when this is printed."""

    public: bytes
    """Its own key."""
    secret: bytes = field(repr=False)
    """The other half."""
    learner_public: bytes
    """The key of the learner it is willing to talk to."""
    file: Path
    """Where it came from, for messages."""


def create_keys(keys_dir: Path) -> None:
    """New keys in this folder, which holds none yet. Modes are set, not left to the umask."""
    learner_public, learner_secret = (key.decode() for key in zmq.curve_keypair())
    public, secret = (key.decode() for key in zmq.curve_keypair())
    keys_dir.mkdir(mode=0o700, exist_ok=True)
    keys_dir.chmod(0o700)
    try:
        write_secret(keys_dir / LEARNER_FILE, LearnerFile(public=learner_public, secret=learner_secret))
        write_secret(keys_dir / ACTOR_FILE, ActorFile(public=public, secret=secret, learner_public=learner_public))
    except FileExistsError as error:
        raise SecurityError(f"{error.filename} exists; use the keys there, or remove it to have new ones.") from None


def load_learner_keys(keys_dir: Path) -> LearnerKeys:
    """The learner's key, and the one it lets in."""
    own = read_secret(keys_dir / LEARNER_FILE, LearnerFile)
    actor = load_actor_key(keys_dir / ACTOR_FILE)
    return LearnerKeys(public=own.public.encode(), secret=own.secret.encode(), actor_public=actor.public)


def load_actor_key(file: Path) -> ActorKey:
    """An actor's key."""
    content = read_secret(file, ActorFile)
    if not is_key(content.learner_public):
        raise malformed(file)
    return ActorKey(
        public=content.public.encode(),
        secret=content.secret.encode(),
        learner_public=content.learner_public.encode(),
        file=file,
    )


def write_secret(file: Path, content: LearnerFile | ActorFile) -> None:
    """A new file that nobody else could read at any moment."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(descriptor, "wb") as stream:
        os.fchmod(descriptor, 0o600)
        stream.write(msgspec.json.encode(content))
        stream.flush()
        os.fsync(descriptor)


def read_secret(file: Path, kind: type[AnyFile]) -> AnyFile:
    """Contents of a key file, if nobody else can read it. Mode and contents come from one open file."""
    try:
        with file.open("rb") as stream:
            if stat.S_IMODE(os.fstat(stream.fileno()).st_mode) & 0o077:
                raise SecurityError(f"The key file {file} can be read by others; run `chmod 600 {file}`.")
            content = msgspec.json.decode(stream.read(MAX_FILE_BYTES), type=kind)
    except OSError as error:
        raise SecurityError(
            f"The key file {file} cannot be read ({error.strerror}); copy it from keys/ of the run directory."
        ) from error
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise malformed(file) from None
    if not is_key(content.secret) or public_half(content.secret) != content.public.encode():
        raise malformed(file)
    return content


def malformed(file: Path) -> SecurityError:
    """Says nothing of what was found, for it may be a secret."""
    return SecurityError(f"The key file {file} does not hold a key; copy it anew from keys/ of the run directory.")


def is_key(text: str) -> bool:
    """Forty characters of Z85. Any 32 bytes are a secret key, so libzmq judges public ones too."""
    try:
        public_half(text)
    except (ValueError, zmq.ZMQError):
        return False
    return True


def public_half(secret: str) -> bytes:
    """The public key that belongs to a secret one."""
    return zmq.curve_public(secret.encode())
