"""Start an actor: `python -m actor --run DIR --id actor0` beside its learner, or, on another machine,

    python -m actor --connect tcp://host:port --key NAME.json --config config.json

after copying `keys/NAME.json`, which `python -m launch key RUN NAME` makes, and the run's `config.json` there. The key
file says which actor this is. `python -m launch invite RUN` prints a command that joins once, with a key that the actor
makes for itself (invited.py):

    echo '...' | python -m actor --invitation -

Where all machines see the run's folder, `--run DIR --id actor0 --connect tcp://host:port` takes key and configuration
from there and computes on cores of its own.

Arguments, keys and config are checked before torch loads. With `--run` and `--trace` it
notes its phases in `logs/trace-NAME.json` of the run.
"""

import argparse
import os
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TextIO

from actor.invited import join
from protocol.access.keys import HOW_TO_GET_ONE, check_folder, load_actor_key
from protocol.transport import ZmqActorPort
from shared.config.load import config_from_json
from shared.config.model import ModelConfig, cache_root
from shared.config.processes import dial_address
from shared.config.tree import Config
from shared.errors import ConfigError, RunDirError
from shared.process.determinism import cpu_environment
from shared.process.entry_point import run_process
from shared.process.invitation import MAX_TEXT_BYTES, accept
from shared.process.processor import is_open
from shared.process.trace import open_trace
from shared.process.usable_cards import check_cards
from shared.process.watchdog import Watchdog, WatchedActorPort, open_stacks
from shared.run.forecast import planned_on_card
from shared.run.run_dir import RunDir

POLL_S = 0.2


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m actor", description="Samples and scores groups for a learner.")
    parser.add_argument("--id", help="name of the actor's key in the run directory (default: actor0)")
    parser.add_argument("--run", type=Path, help="run directory, when it is on this machine")
    parser.add_argument("--connect", metavar="ENDPOINT", help="tcp://host:port of a learner elsewhere")
    parser.add_argument("--key", type=Path, help="a key made for this actor by `python -m launch key`")
    parser.add_argument("--config", type=Path, help="the run's config.json")
    parser.add_argument("--invitation", metavar="FILE", help="what `python -m launch invite` printed; - reads stdin")
    parser.add_argument("--trace", action="store_true", help="with --run: note when it waits, decodes and scores")
    arguments = parser.parse_args(argv)
    if arguments.invitation:
        if any((arguments.id, arguments.run, arguments.connect, arguments.key, arguments.config)):
            parser.error("an invitation has address, key and config; give --invitation alone")
        arguments.id = "invited"
        return arguments
    if arguments.run is None and arguments.key is None:
        parser.error(f"an actor needs a key (--key FILE): {HOW_TO_GET_ONE}")
    if arguments.run is None and not (arguments.connect and arguments.config):
        parser.error("give --run DIR, or --connect ENDPOINT with --key FILE and --config FILE")
    if arguments.id and arguments.key:
        parser.error("give --id or --key, not both: a key file names its actor")
    arguments.id = arguments.id or (arguments.key.stem if arguments.key else "actor0")
    return arguments


def main(arguments: argparse.Namespace) -> None:
    """Check everything that is quick to check, then load torch and serve."""
    found = accept(read_text(arguments.invitation), cache_root(ModelConfig())) if arguments.invitation else None
    if found:
        arguments.connect, arguments.key, arguments.config = found.endpoint, found.key, found.config
    files = local_files(RunDir.open(arguments.run), arguments.id) if arguments.run else {}
    files |= {name: path for name in ("config", "key") if (path := getattr(arguments, name))}
    config = started_config(files["config"], may_wait=arguments.config is None)
    if not config.actor.is_elsewhere:
        check_cards(config.compute, ("actor",))
    os.environ.update(cpu_environment(config.compute.actor_threads, config.compute.blas))
    if arguments.key is None:
        check_folder(files["key"].parent)
    key = join(found, config.link.silence_s) if found else load_actor_key(files["key"])
    endpoint = arguments.connect or dial_address(config.link, arguments.run)
    elsewhere = may_be_remote(arguments)
    # Without a run directory, the actors of this machine share the lease file beside their common config.json.
    lease = None if elsewhere else files.get("lease", files["config"].with_name("lease"))
    with stacks_of(arguments) as stacks:
        from actor.passed_on import passed_on
        from actor.wiring import serve_orders

        connected = ZmqActorPort(endpoint, key, silence_s=config.link.silence_s)
        port = WatchedActorPort(connected, Watchdog(config.link.silence_s, stacks))
        trace = open_trace(arguments.run, key.actor_id, wanted=arguments.trace)
        planned = planned_on_card(RunDir(arguments.run), "actor") if arguments.run else 0
        beside_learner = None if elsewhere else arguments.run is not None
        passes = passed_on(endpoint, key.learner_public)
        serve_orders(config, port, endpoint, key.actor_id, lease, trace, planned, passes, beside_learner=beside_learner)


def may_be_remote(arguments: argparse.Namespace) -> bool:
    """Whether it sees the run's folder from another machine than the learner's, as far as one can know."""
    return bool(arguments.run and arguments.connect)


def stacks_of(arguments: argparse.Namespace) -> AbstractContextManager[TextIO]:
    """Where the watchdog writes stacks: a file of the run directory, or stderr without one."""
    if arguments.run is None:
        return nullcontext(sys.stderr)
    return open_stacks(RunDir(arguments.run).stacks(arguments.id))


def local_files(run: RunDir, actor_id: str) -> dict[str, Path]:
    return {"config": run.config, "key": run.keys / f"{actor_id}.json", "lease": run.lease}


def read_text(name: str) -> str:
    """Of an invitation. name: of its file; `-` for stdin."""
    try:
        return sys.stdin.read(MAX_TEXT_BYTES) if name == "-" else Path(name).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"The invitation {name} cannot be read ({error}); give the file that has it.") from error


def read_config(path: Path) -> Config:
    if not path.is_file():
        raise RunDirError(f"There is no config at {path}; copy the run's config.json there.")
    return config_from_json(path.read_bytes())


def started_config(path: Path, *, may_wait: bool) -> Config:
    """As the learner has completed it when the run started: an actor that chose by itself might choose otherwise.
    may_wait: the learner writes this file, so wait as long as for a peer to appear; a copy does not change."""
    config = read_config(path)
    until = time.monotonic() + (config.link.silence_s if may_wait else 0.0)
    while is_open(config):
        if time.monotonic() >= until:
            remedy = "start the learner" if may_wait else "start the learner, then copy the run's config.json again"
            raise RunDirError(
                f"{path} belongs to a run that was prepared but not started, so number type and threads are not"
                f" chosen yet; {remedy}."
            )
        time.sleep(POLL_S)
        config = read_config(path)
    return config


def start(argv: list[str]) -> int:
    """Run an actor; returns the exit code."""
    arguments = parse(argv)
    return run_process(arguments.id, lambda: main(arguments))


if __name__ == "__main__":
    sys.exit(start(sys.argv[1:]))
