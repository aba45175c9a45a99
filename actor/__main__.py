"""Start an actor: `python -m actor --run DIR --id actor0` beside its learner, or, on another machine,

    python -m actor --connect tcp://host:port --key actor.json --config config.json --id NAME

with the run's `keys/actor.json` and `config.json` copied there. Arguments and config are checked before torch loads.
"""

import argparse
import os
import sys
from pathlib import Path

from protocol.security import load_actor_key
from protocol.transport import ZmqActorPort
from shared.config import Config
from shared.config_load import config_from_json
from shared.determinism import cpu_environment
from shared.errors import RunDirError
from shared.process_edge import run_process
from shared.run_dir import RunDir
from shared.wire_address import dial_address


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m actor", description="Samples and scores groups for a learner.")
    parser.add_argument("--id", default="actor0", help="name of this actor; a restarted one keeps it")
    parser.add_argument("--run", type=Path, help="run directory, when it is on this machine")
    parser.add_argument("--connect", metavar="ENDPOINT", help="tcp://host:port of a learner elsewhere")
    parser.add_argument("--key", type=Path, help="the run's keys/actor.json")
    parser.add_argument("--config", type=Path, help="the run's config.json")
    arguments = parser.parse_args(argv)
    if arguments.run is None and not (arguments.connect and arguments.key and arguments.config):
        parser.error("give --run DIR, or --connect ENDPOINT with --key FILE and --config FILE")
    return arguments


def main(arguments: argparse.Namespace) -> None:
    """Check what can be checked quickly, then load and serve."""
    files = local_files(RunDir.open(arguments.run)) if arguments.run else {}
    files |= {name: path for name in ("config", "key") if (path := getattr(arguments, name))}
    config = read_config(files["config"])
    os.environ.update(cpu_environment(config.compute.actor_threads, config.compute.blas))
    key = load_actor_key(files["key"])
    endpoint = arguments.connect or dial_address(config.link, arguments.run)
    # Without a run directory the card is this machine's own affair; whoever else is here has the same config beside it.
    lease = files.get("lease", files["config"].with_name("lease"))

    from actor.wiring import serve_orders

    serve_orders(config, ZmqActorPort(endpoint, arguments.id, key), endpoint, arguments.id, lease)


def local_files(run: RunDir) -> dict[str, Path]:
    """What an actor needs of a run directory on its own machine."""
    return {"config": run.config, "key": run.keys / "actor.json", "lease": run.lease}


def read_config(path: Path) -> Config:
    """The resolved config of the run."""
    if not path.is_file():
        raise RunDirError(f"There is no config at {path}; copy the run's config.json there.")
    return config_from_json(path.read_bytes())


if __name__ == "__main__":
    parsed = parse(sys.argv[1:])
    sys.exit(run_process(parsed.id, lambda: main(parsed)))
