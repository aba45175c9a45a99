"""`key`: make a key for one more actor of a run, before the run starts or while it trains. Each actor has its own."""

from pathlib import Path

from launch.commands.open_run import open_run
from protocol.access.keys import create_actor_key
from shared.config.processes import dial_address


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
