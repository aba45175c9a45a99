"""Which checkpoint of a run a command is about: `--checkpoint STEP|best|latest`."""

from learner.durable.checkpoint import Checkpoint, CheckpointStore
from shared.config.tree import Config
from shared.errors import ConfigError, RunDirError
from shared.run.run_dir import RunDir


def choose_checkpoint(run: RunDir, config: Config, which: str) -> Checkpoint:
    """The one that was asked for."""
    store = CheckpointStore(run.checkpoints, config.checkpoint.keep)
    if which == "latest":
        newest = store.load_latest()
        if newest is None:
            raise RunDirError(
                f"{run.path} has no checkpoint yet; `resume` it until it has one, or ask for the base with --base."
            )
        return newest
    if which == "best":
        return store.load_best()
    if not which.isdecimal():
        raise ConfigError(f"--checkpoint got '{which}', expected a step number, 'best' or 'latest'.")
    return store.load(int(which))
