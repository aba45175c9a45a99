"""`resume`: go on with a run that was stopped, crashed or prepared; with `--steps`, train a finished one further.

With `--resample-step N` the recorded answers of step N and later ones are voided first (learner/durable/resample.py).
"""

import os
import sys
from pathlib import Path

import msgspec

from actor.engines.vllm_options import check_engine
from launch.display.next_command import next_command
from shared.config.load import config_from_json, config_to_json
from shared.config.training import OnFault
from shared.config.tree import Config
from shared.errors import ConfigError
from shared.run.files import write_whole
from shared.run.run_dir import RunDir
from shared.run.summary import Summary, read_summary


def run_command(
    *, directory: Path, steps: int | None, on_fault: OnFault | None, resample_step: int | None, verbose: bool
) -> int:
    """Open the run, train on, report."""
    run = RunDir.open(directory)
    warn_of_another_owner(run)
    # Held while config.json may change, so that a run in use is refused first; the learner then takes it itself.
    with run.hold():
        summary = read_summary(run)
        config = with_steps(run, config_from_json(run.config.read_bytes()), steps, summary)
        config = with_on_fault(run, config, on_fault)
        if resample_step is not None:
            print(resampled(run, config, resample_step), file=sys.stderr)
    if summary and summary.status == "done" and summary.steps >= config.run.steps:
        print(finished(directory, summary.steps))
        return 0
    check_engine(config.actor)
    # Late, so that whatever is wrong with the input is said before the display is loaded.
    from launch.commands.watch_run import attend

    attend(run, config, verbose=verbose)
    return 0


def with_steps(run: RunDir, config: Config, steps: int | None, summary: Summary | None) -> Config:
    """Write another number of steps into the run, if one was asked for."""
    if steps is None or steps == config.run.steps:
        return config
    done = summary.steps if summary else 0
    if steps <= done:
        raise ConfigError(f"--steps got {steps}, but {run.path} has done {done} already; give a larger number.")
    if config.optimizer.schedule != "constant":
        raise ConfigError(
            f"--steps got {steps}, but the '{config.optimizer.schedule}' schedule of {run.path} was laid out for"
            f" {config.run.steps} steps and what was trained followed it; begin a new run with run.steps={steps}."
        )
    changed = msgspec.structs.replace(config, run=msgspec.structs.replace(config.run, steps=steps))
    write_whole(run.config, config_to_json(changed))
    return changed


def with_on_fault(run: RunDir, config: Config, on_fault: OnFault | None) -> Config:
    """Write another policy into the run, if one was asked for. No step until now met a fault, or the run had ended
    there; so what was trained is what the new policy would have trained, and a replay agrees."""
    if on_fault is None or on_fault == config.guard.on_fault:
        return config
    changed = msgspec.structs.replace(config, guard=msgspec.structs.replace(config.guard, on_fault=on_fault))
    write_whole(run.config, config_to_json(changed))
    return changed


def warn_of_another_owner(run: RunDir) -> None:
    """Root may write where the owner then may not. A warning: some file systems show one owner for everything."""
    owner, user = run.path.stat().st_uid, os.geteuid()
    if owner != user:
        print(
            f"warning: {run.path} belongs to user {owner}, and this is user {user}: the owner may be unable to go on"
            " with what is written now; better resume it as its owner.",
            file=sys.stderr,
        )


def resampled(run: RunDir, config: Config, step: int) -> str:
    """Void what is recorded of the step and later ones; what was done."""
    from learner.durable.checkpoint import CheckpointStore
    from learner.durable.resample import sample_again

    count = sample_again(run, CheckpointStore(run.checkpoints, config.checkpoint.keep), step, config.run.steps)
    if count == 0:
        return f"the journal of {run.path} holds no answer of step {step} or later; nothing had to be voided"
    return f"{count} recorded answers of step {step} and later are void; their orders are given again"


def finished(directory: Path, steps: int) -> str:
    """Nothing to do, and what could be done."""
    command = next_command("resume", str(directory), "--steps", str(2 * steps))
    return f"{directory} is finished: all {steps} steps are done. To train on: {command}"
