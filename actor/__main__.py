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
    run = None if arguments.run is None else RunDir.open(arguments.run)
    config = read_config(arguments.config or (run and run.config))
    os.environ.update(cpu_environment(config.compute.actor_threads, config.compute.blas))
    key = load_actor_key(arguments.key or (run and run.keys / "actor.json"))
    endpoint = arguments.connect or dial_address(config.link, arguments.run)

    from actor.wiring import serve_orders

    with_lease = run.lease if run else arguments.config.with_name("lease")
    serve_orders(config, ZmqActorPort(endpoint, arguments.id, key), endpoint, arguments.id, with_lease)


def read_config(path: Path) -> Config:
    """The resolved config of the run."""
    if not path.is_file():
        raise RunDirError(f"There is no config at {path}; copy the run's config.json there.")
    return config_from_json(path.read_bytes())


if __name__ == "__main__":
    parsed = parse(sys.argv[1:])
    sys.exit(run_process(parsed.id, lambda: main(parsed)))
