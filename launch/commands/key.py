"""`key`: make a key for one more actor of a run, before the run starts or while it trains. Each actor has its own.

`invite` makes a key too, and prints one command that joins with it from another machine (shared/process/invitation.py).
"""

import shlex
from ipaddress import ip_address
from itertools import count
from pathlib import Path
from urllib.parse import urlsplit

from launch.commands.open_run import open_run
from protocol.access.keys import ActorFile, create_actor_key, read_key_file
from shared.config.load import config_from_json
from shared.config.processes import LinkConfig, dial_address
from shared.errors import ConfigError
from shared.process.invitation import digest, write_invitation
from shared.process.processor import is_open
from shared.run.run_dir import RunDir


def make_key(*, directory: Path, name: str) -> int:
    """Make the key, and print how an actor uses it."""
    run, config = open_run(directory)
    file = create_actor_key(run.keys, name)
    print(f"{file} is the key of actor {name}. On this machine: python -m actor --run {directory} --id {name}")
    if config.link.endpoint != "ipc":
        print(f"On another machine, copy {file} (mode 600, over a channel you trust) and {run.config} there, and run:")
        print(
            f"  python -m actor --connect {dial_address(config.link, directory)} --key {name}.json --config config.json"
        )
    print(f"To revoke this key, even while the run trains: rm {run.keys / 'allowed' / file.name}")
    return 0


def invite(*, directory: Path, name: str | None) -> int:
    """Make a key, and print the command. name: of the actor; without one, the first that is free."""
    run = RunDir.open(directory)
    config = config_from_json(run.config.read_bytes())
    refuse_local(config.link, run.config)
    if is_open(config.compute):
        raise ConfigError(
            f"{directory} was prepared and has not started, so number type and threads are not chosen yet; start it"
            f" with `resume {directory}` first."
        )
    name = name or next(one for number in count() if not (run.keys / f"{(one := f'guest{number}')}.json").exists())
    file = create_actor_key(run.keys, name)
    text = write_invitation(config.link.endpoint, read_key_file(file, ActorFile), config)
    print(f"On the other machine, in a folder with the same version of Tandem, run this one line as actor {name}:\n")
    print(f"echo {shlex.quote(text)} | python -m actor --invitation -\n")
    print(f"It joins {config.link.endpoint} with the configuration {digest(config)[:12]}.", end=" ")
    print("It has a secret key: send it over a channel that you trust.")
    if Path(config.model.path).exists():
        print(f"The other machine needs the model at the same path: {config.model.path}")
    print(f"To revoke it, even while the run trains: rm {run.keys / 'allowed' / file.name}")
    return 0


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
