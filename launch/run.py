"""`run`: a new run from a preset or a file.

`--prepare` stops after the run directory is made: other ways to start the processes (containers, another machine)
take it from there. `--dry-run` does not even make that.
"""

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from actor.engines.vllm_options import check_engine
from launch.describe import describe
from launch.next_command import next_command
from launch.topology import topology
from protocol.access.keys import create_keys
from shared.config.load import config_to_json, load_config
from shared.config.tree import Config
from shared.run.run_dir import RunDir


def run_command(
    *, source: str, overrides: Sequence[str], out: Path | None, dry_run: bool, prepare: bool, verbose: bool
) -> int:
    """Make the run directory, train, report."""
    config = load_config(source, overrides)
    folder = out or default_folder(source, datetime.now())
    if dry_run:
        print(describe(topology(folder, config), config))
        return 0
    if not prepare:
        check_engine(config.actor)
    run = make_run(folder, config)
    if prepare:
        print(f"{folder} is prepared; start it with: {next_command('resume', str(folder))}")
        return 0
    # Late, so that whatever is wrong with the input is said before the display is loaded.
    from launch.attend import attend

    attend(run, config, verbose=verbose)
    return 0


def default_folder(source: str, now: datetime) -> Path:
    """runs/<preset>-<time>"""
    return Path("runs") / f"{Path(source).stem}-{now:%Y%m%d-%H%M%S}"


def make_run(folder: Path, config: Config) -> RunDir:
    """The directory with configuration and keys."""
    actor_ids = [actor.name for actor in topology(folder, config).actors]
    return RunDir.create(folder, config_to_json(config), create_keys=lambda keys: create_keys(keys, actor_ids))
