"""An invitation: one line of text with all that an actor on another machine needs to join a run, once.

    base64 of zlib of JSON     {endpoint, key, expires_at, changed, sha256}

Its key is accepted once and until it expires, for adding the key that the actor makes for itself (actor/invited.py).

It has the configuration as the keys that differ from the defaults, and the digest of the whole: another version of
Tandem, with other keys or defaults, notices it and refuses. It has a secret key, so it goes over a channel that you
trust, and the actor reads it from a file or from stdin: the command line of a process is no secret.
"""

import base64
import hashlib
import hmac
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from msgspec import structs

from protocol.access.keys import ACTOR_ID, ActorFile, ActorKey, actor_key, new_pair
from protocol.endpoint import make_private
from protocol.messages import Record
from shared.config.load import config_to_json, resolve
from shared.config.tree import Config
from shared.errors import ConfigError
from shared.run.files import make_folder, write_whole

MAX_TEXT_BYTES = 65_536
MAX_JSON_BYTES = 262_144
DAMAGED = "The invitation is damaged or cut short; copy the whole line that `python -m launch invite RUN` prints."
CACHE_VARIABLE = "XDG_CACHE_HOME"
TAKEN = ("config", "lease", "unconfirmed")
"""Names that no invited actor may have: other files of its folder are called so."""


class Invitation(Record, frozen=True, kw_only=True):
    """Its content."""

    endpoint: str
    """Address of the learner."""
    key: ActorFile
    """For joining, once."""
    expires_at: float
    """Unix time until which it is accepted, by the clock of the learner's machine."""
    changed: dict[str, dict[str, Any]]
    """Section -> key -> value, of the keys that differ from the defaults."""
    sha256: str
    """Of the whole configuration as JSON."""


@dataclass(frozen=True, kw_only=True)
class Accepted:
    """An invitation as files of the invited machine."""

    endpoint: str
    config: Path
    key: Path
    """The actor's own key; there once the learner has accepted it."""
    unconfirmed: Path
    """The same until then."""
    invitation: ActorKey
    """Its key. `file` is not a file."""
    expires_at: float


def write_invitation(endpoint: str, key: ActorFile, expires_at: float, config: Config) -> str:
    content = Invitation(
        endpoint=endpoint, key=key, expires_at=expires_at, changed=differing(config), sha256=digest(config)
    )
    return base64.urlsafe_b64encode(zlib.compress(msgspec.json.encode(content), 9)).decode()


def differing(config: Config) -> dict[str, dict[str, Any]]:
    whole, usual = msgspec.to_builtins(config), msgspec.to_builtins(Config())
    changed = {
        section: {key: value for key, value in keys.items() if value != usual[section][key]}
        for section, keys in whole.items()
    }
    return {section: keys for section, keys in changed.items() if keys}


def digest(config: Config) -> str:
    return hashlib.sha256(config_to_json(config)).hexdigest()


def read_invitation(text: str) -> Invitation:
    """ConfigError if it is no invitation."""
    try:
        packed = base64.b64decode("".join(text.split())[:MAX_TEXT_BYTES], altchars=b"-_", validate=True)
        stream = zlib.decompressobj()
        plain = stream.decompress(packed, MAX_JSON_BYTES)
        if not stream.eof:
            raise ConfigError(DAMAGED)
        return msgspec.json.decode(plain, type=Invitation)
    except (ValueError, zlib.error, RecursionError):
        # Without the cause, which may quote the key.
        raise ConfigError(DAMAGED) from None


def accept(text: str, cache: Path) -> Accepted:
    """Write the configuration and a new key pair into a folder of the cache that only this user can read. All invited
    actors of a run on this machine have the same one, and so one lease. A pair that is there already stays: its public
    half may be with the learner."""
    invitation = read_invitation(text)
    name = file_name(invitation.key.actor_id)
    config = resolve(invitation.changed)
    if not hmac.compare_digest(digest(config), invitation.sha256):
        raise ConfigError(
            "The invitation was written by another version of Tandem, whose configuration has other keys or defaults;"
            " install the version of the learner's machine here."
        )
    make_folder(cache, place=CACHE_VARIABLE)
    folder = cache / f"invited-{hashlib.sha256(invitation.key.learner_public.encode()).hexdigest()[:16]}"
    for private in (folder, folder / "unconfirmed"):
        make_private(private, CACHE_VARIABLE)
    accepted = Accepted(
        endpoint=invitation.endpoint,
        config=folder / "config.json",
        key=folder / f"{name}.json",
        unconfirmed=folder / "unconfirmed" / f"{name}.json",
        invitation=actor_key(invitation.key, Path("of the invitation")),
        expires_at=invitation.expires_at,
    )
    write_whole(accepted.config, config_to_json(config), 0o600, place=CACHE_VARIABLE)
    if not accepted.key.exists() and not accepted.unconfirmed.exists():
        public, secret = new_pair()
        own = structs.replace(invitation.key, public=public, secret=secret)
        write_whole(accepted.unconfirmed, msgspec.json.encode(own), 0o600, place=CACHE_VARIABLE)
    return accepted


def file_name(actor_id: str) -> str:
    """Of its key. ConfigError for what no actor is called, such as a path or another file of the folder."""
    if not ACTOR_ID.fullmatch(actor_id) or actor_id in TAKEN:
        raise ConfigError(DAMAGED)
    return actor_id
