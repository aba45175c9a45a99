"""`key`: one more actor may join a run, while it goes on or before. Each actor has a key of its own."""

from pathlib import Path

from protocol.access.keys import create_actor_key
from shared.config.load import config_from_json
from shared.config.processes import dial_address
from shared.run.run_dir import RunDir


def run_command(*, directory: Path, name: str) -> int:
    """Make it, and say what it is for."""
    run = RunDir.open(directory)
    config = config_from_json(run.config.read_bytes())
    file = create_actor_key(run.keys, name)
    print(f"{file} is the key of actor {name}. On this machine: python -m actor --run {directory} --id {name}")
    if config.link.endpoint != "ipc":
        print(f"On another, with {file} (mode 600, over a channel you trust) and {run.config} copied there:")
        print(
            f"  python -m actor --connect {dial_address(config.link, directory)} --key {name}.json --config config.json"
        )
    print(f"To shut it out again, also of a live run: rm {run.keys / 'allowed' / file.name}")
    return 0
