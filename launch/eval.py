"""`eval`: held-out accuracy of a run's checkpoint, with its 95 % interval, in this process alone."""

import json
import os
from pathlib import Path

import msgspec

from launch.results import read_evaluation
from learner.checkpoint import Checkpoint, CheckpointStore
from shared.config import Config
from shared.config_load import config_from_json
from shared.determinism import cpu_environment
from shared.errors import ConfigError, DataError, RunDirError
from shared.files import write_whole
from shared.run_dir import RunDir


def run_command(*, directory: Path, checkpoint: str, problems: int | None) -> int:
    """Evaluate, print, keep in eval/."""
    run = RunDir.open(directory)
    config = config_from_json(run.config.read_bytes())
    if problems is not None:
        config = msgspec.structs.replace(config, eval=msgspec.structs.replace(config.eval, problems=problems))
    chosen = choose(CheckpointStore(run.checkpoints, config.checkpoint.keep), checkpoint, directory)
    os.environ.update(cpu_environment(config.compute.actor_threads, config.compute.blas))
    report = evaluate(config, chosen)
    write_whole(run.eval / f"{report['label']}.json", json.dumps(report, indent=2).encode())
    print_shares(run, report)
    return 0


def choose(store: CheckpointStore, which: str, directory: Path) -> Checkpoint:
    """The checkpoint that was asked for."""
    if which == "latest":
        newest = store.load_latest()
        if newest is None:
            raise RunDirError(f"{directory} has no checkpoint yet; `resume` it until it has one.")
        return newest
    if which == "best":
        return store.load_best()
    if not which.isdecimal():
        raise ConfigError(f"--checkpoint got '{which}', expected a step number, 'best' or 'latest'.")
    return store.load(int(which))


def evaluate(config: Config, checkpoint: Checkpoint) -> dict[str, object]:
    """The report of this checkpoint."""
    from launch.local_actor import local_actor
    from launch.local_desk import LocalDesk
    from learner.evaluate import Evaluation
    from learner.publisher import policy_message
    from learner.state import ADAPTER
    from learner.tasks import load_tasks

    with local_actor(config) as (rollout, prompter):
        desk = LocalDesk(rollout)
        desk.publish(policy_message(checkpoint.step, checkpoint.files[ADAPTER]), oldest_needed=0)
        held_out = load_tasks(config.tasks, prompter).held_out
        if not held_out or config.eval.problems == 0:
            raise DataError("There are no held-out tasks to evaluate on; set tasks.held_out and eval.problems.")
        evaluation = Evaluation(config, held_out, desk, prompter.text)
        return evaluation.run(f"step-{checkpoint.step:06d}", version=checkpoint.step)


def print_shares(run: RunDir, report: dict[str, object]) -> None:
    """One line a way of decoding."""
    label = str(report["label"])
    evaluation = read_evaluation(run, label)
    assert evaluation is not None
    for name, share in (("greedy", evaluation.greedy), ("sampled", evaluation.sampled)):
        interval = f"[{share.low:.1%}, {share.high:.1%}]"
        print(f"{label}  {name:8s} {share.accuracy:.1%}  95 % {interval}  n = {evaluation.n}")
    print(f"kept in {run.eval / label}.json")
