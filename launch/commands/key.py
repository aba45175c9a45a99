"""`key`, `invite`, `keys`: make a key for one more actor of a run, invite one from another machine, list and revoke.

`key` makes a file to copy. `invite` prints one command that joins once, within some hours, with a key that the other
machine makes for itself (actor/invited.py). `keys` lists who may join, and can revoke it. All three work before a run
starts and while it trains.
"""

import shlex
import time
from ipaddress import ip_address
from itertools import count
from pathlib import Path
from urllib.parse import urlsplit

from launch.commands.open_run import open_run
from protocol.access.key_list import ListedKey, create_invitation, is_taken, list_keys, revoke, utc
from protocol.access.keys import check_folder, create_actor_key
from protocol.plain_text import for_terminal
from shared.config.load import config_from_json
from shared.config.processes import LinkConfig
from shared.errors import ConfigError
from shared.process.invitation import TAKEN, digest, write_invitation
from shared.process.processor import is_open
from shared.run.files import disk_errors
from shared.run.run_dir import RUN_DIR, RunDir

REVOKED_BY_HAND = "by hand"
MAX_HOURS = 24 * 365


def make_key(*, directory: Path, name: str) -> int:
    """Make the key, and print how an actor uses it."""
    run, config = open_run(directory)
    with disk_errors(run.keys, RUN_DIR):
        file = create_actor_key(run.keys, name)
    folder = shlex.quote(str(directory))
    print(f"{file} is the key of actor {name}. On this machine: python -m actor --run {folder} --id {name}")
    if config.link.endpoint != "ipc":
        print(f"On another machine, copy {file} (mode 600, over a channel you trust) and {run.config} there, and run:")
        local = is_local(config.link.endpoint, to_listen=False)
        address = "tcp://HOST:PORT" if local else config.link.endpoint
        print(f"  python -m actor --connect {address} --key {name}.json --config config.json")
        if local:
            print(f"HOST:PORT is where that machine reaches this one; {config.link.endpoint} works only on this one.")
    print_how_to_revoke(directory, name)
    return 0


def print_how_to_revoke(directory: Path, name: str) -> None:
    folder = shlex.quote(str(directory))
    print(f"To revoke it, even while the run trains: python -m launch keys {folder} --revoke {name}")


def invite(*, directory: Path, name: str | None, hours: int) -> int:
    """Print the command. name: of the actor; without one, the first that is free. hours: until it expires."""
    run = RunDir.open(directory)
    config = config_from_json(run.config.read_bytes())
    refuse_local(config.link, run.config)
    if is_open(config):
        raise ConfigError(
            f"{directory} was prepared and has not started, so number type and threads are not chosen yet; start it"
            f" with `resume {directory}` first."
        )
    refuse_odd(name, hours)
    name = name or next(one for number in count() if not is_taken(run.keys, one := f"guest{number}"))
    expires_at = time.time() + 3600 * hours
    with disk_errors(run.keys, RUN_DIR):
        key = create_invitation(run.keys, name, expires_at)
    text = write_invitation(config.link.endpoint, key, expires_at, config)
    print(f"On the other machine, in a folder with the same version of Tandem, run this one line as actor {name}:\n")
    print(f"echo {shlex.quote(text)} | python -m actor --invitation -\n")
    print(
        f"It joins {config.link.endpoint} with the configuration {digest(config)[:12]}, once, until {utc(expires_at)}."
    )
    print("The line has a secret key, which is not stored on this machine: send it over a channel that you trust.")
    if Path(config.model.path).exists():
        print(f"The other machine needs the model at the same path: {config.model.path}")
    print_how_to_revoke(directory, name)
    return 0


def keys(*, directory: Path, revoked: str | None) -> int:
    """List keys and invitations; first revoke those of one actor, if its name is given."""
    run = RunDir.open(directory)
    check_folder(run.keys)
    if revoked:
        with disk_errors(run.keys, RUN_DIR):
            revoke(run.keys, revoked, REVOKED_BY_HAND, time.time())
        print(f"The key of {revoked} is revoked: its connection ends within seconds and its orders go to others.")
        return 0
    print(f"{'actor':<16} {'fingerprint':<18}{'state'}")
    for key in list_keys(run.keys, time.time()):
        print(f"{key.actor_id:<16} {key.fingerprint:<18}{in_words(key)}")
    return 0


def in_words(key: ListedKey) -> str:
    match key.state:
        case "invited":
            return f"invited, until {utc(key.at)}"
        case "expired":
            return f"not joined; the invitation expired at {utc(key.at)}"
        case "revoked":
            return f"revoked at {utc(key.at)}: {for_terminal(key.reason)}"
        case "allowed":
            how = "joined by invitation" if key.invited else "made here"
            seen = f"last seen at {utc(key.seen_at)}" if key.seen_at else "not seen yet"
            return f"{how}{f' at {utc(key.at)}' if key.at else ''}, {seen}"


def refuse_odd(name: str | None, hours: int) -> None:
    """ConfigError for what the invited machine, or a calendar, could not take."""
    if name in TAKEN:
        raise ConfigError(
            f"An invited actor cannot be called '{name}', as a file beside its key is; choose another name."
        )
    if hours > MAX_HOURS:
        raise ConfigError(f"--hours got {hours}; expected at most {MAX_HOURS}.")


def refuse_local(link: LinkConfig, config: Path) -> None:
    """ConfigError if no other machine can reach the learner."""
    how = f"set it in {config} while the run is stopped, then `resume`"
    if link.endpoint == "ipc":
        raise ConfigError(
            "The run listens on a socket of this machine (link.endpoint = 'ipc'); for actors elsewhere link.endpoint"
            f" must be tcp://HOST:PORT with a HOST that they can reach: {how}."
        )
    for key, address in (("link.endpoint", link.endpoint), ("link.bind", link.bind)):
        if address and is_local(address, to_listen=key == "link.bind"):
            raise ConfigError(
                f"No other machine can reach this one at that address ({key} = '{address}'); {key} must name an address"
                f" of this machine in its network: {how}."
            )


def is_local(address: str, *, to_listen: bool) -> bool:
    """Whether only this machine can reach it. to_listen: 0.0.0.0 stands for all of its addresses then."""
    host = urlsplit(address).hostname or ""
    try:
        found = ip_address(host)
    except ValueError:
        return host == "localhost" or not address.startswith("tcp:")
    return found.is_loopback or (found.is_unspecified and not to_listen)
