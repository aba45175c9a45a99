"""`resume`: continue a run that was stopped, crashed or only prepared; with `--steps`, train a finished run further.

With `--actors N` it continues with N actors on this machine, which changes no result. With `--ranks N` the learner has
N processes from then on, which changes the last bits; the journal records it, so a replay still matches. With
`--resample-step N` the recorded groups of step N and later are voided first, and sampled again
(learner/durable/resample.py). Of a run that is done, tracker and evaluator are started for what they had not done.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from actor.engines.vllm_options import check_engine
from launch.commands.run import announce, planned, refuse, warn_of_cpu, warn_of_idle_actors
from launch.display.console import next_command
from launch.on_ray.placement import Machine, capacity_on_ray, places_of
from launch.supervisor.followers import Followers
from launch.supervisor.restarts import SupervisorLimits
from launch.supervisor.topology import Process, topology
from launch.tracking.trackers import check_tracker
from protocol.access.keys import create_actor_key
from shared.config.data import CurriculumConfig
from shared.config.load import check_together, config_from_json, config_to_json
from shared.config.processes import MAX_ACTORS, MAX_RANKS, ActorConfig, ComputeConfig
from shared.config.training import OnFault
from shared.config.tree import Config
from shared.errors import ConfigError
from shared.process.entry_point import keep_to_itself
from shared.process.processor import is_open, settled_config, start_config, write_choices
from shared.process.usable_cards import check_cards, roles_here
from shared.run.files import disk_errors, write_whole
from shared.run.run_dir import RUN_DIR, RunDir
from shared.run.summary import Summary, read_summary


def resume_run(
    *,
    directory: Path,
    steps: int | None,
    actors: int | None,
    ranks: int | None,
    on_fault: OnFault | None,
    resample_step: int | None,
    on: Machine,
    verbose: bool,
    trace: bool,
) -> int:
    run = RunDir.open(directory)
    warn_of_another_owner(run)
    # The lock comes first, so that a run in use is refused before config.json changes. The learner takes it later.
    with run.locked():
        summary, config = read_summary(run), config_from_json(run.config.read_bytes())
        if steps is not None and steps != config.run.steps:
            before, newest = config.run.steps, newest_step(run, config.checkpoint.keep)
            refuse_fewer_steps(run.path, steps, newest, summary)
            if newest or any(run.journal.glob("*")):
                refuse_other_rates(run.path, steps, before, config.optimizer.schedule)
                refuse_other_stages(run.path, steps, before, config.curriculum)
                refuse_other_lag(run.path, steps, before, newest, config.pipeline.max_lag)
        # Another on_fault does not change what was trained so far: no step has met a fault yet, or the run would have
        # ended there. So a replay still gives the same adapter. The number of actors never changes it.
        changed = replace(
            config,
            run=replace(config.run, steps=steps or config.run.steps),
            guard=replace(config.guard, on_fault=on_fault or config.guard.on_fault),
            compute=with_counts(config.compute, actors, ranks),
        )
        check_together(changed)  # while nothing is written
        if resample_step is not None:  # it may be refused, so do it before writing anything
            print(resample(run, resample_step, changed.run.steps, changed.checkpoint.keep), file=sys.stderr)
        if actors:
            add_keys(run.keys, [actor.name for actor in topology(run.path, changed).actors])
        if changed != config:
            write_whole(run.config, config_to_json(changed))
    if summary and summary.status == "done" and summary.steps >= changed.run.steps:
        finish_followers(run, topology(run.path, changed).followers)
        print(finished(directory, summary.steps, can_be_extended=config.can_be_extended))
        return 0
    check_tracker(changed.tracking)
    if not changed.is_warm_start:
        warn_of_idle_actors(changed.compute, changed.rollout, changed.pipeline.max_lag, on)
    if on == "here":
        check_machine(changed.actor, changed.compute)
    with run.locked():
        changed = config_to_resume(run, on)
    places = places_of(topology(run.path, changed), changed.compute, changed.ray, changed.actor)
    # Imported late, so that a mistake in the input is reported before the display is loaded.
    from launch.commands.watch_run import supervising, watch_run

    with supervising(on, places) as supervise:
        watch_run(run, changed, verbose=verbose, trace=trace, supervise=supervise)
    return 0


def with_counts(compute: ComputeConfig, actors: int | None, ranks: int | None) -> ComputeConfig:
    return replace(
        compute,
        actors=at_most("--actors", actors or compute.actors, MAX_ACTORS),
        ranks=at_most("--ranks", ranks or compute.ranks, MAX_RANKS),
    )


def config_to_resume(run: RunDir, on: Machine) -> Config:
    """The configuration to go on with. A prepared run that starts here gets its plan; if that refuses it, this writes
    nothing. Call it with the run locked."""
    config = config_from_json(run.config.read_bytes())
    if on == "ray" or not is_open(config):
        return start_config(run, capacity_on_ray(config.compute, config.ray) if on == "ray" else None)
    card = check_cards(config.compute, ("learner",))
    config, cost = planned(settled_config(config))
    try:
        refuse(cost, config.model.path)
    except ConfigError as error:
        raise ConfigError(
            f"{error} `resume` takes no --set: prepare the run again with these keys, in another folder."
        ) from error
    write_choices(run, config, card)
    announce(run, str(run.path), cost)
    return config


def check_machine(actor: ActorConfig, compute: ComputeConfig) -> None:
    check_engine(actor)
    warn_of_cpu(compute)
    check_cards(compute, roles_here(actor))


def at_most(option: str, count: int, limit: int) -> int:
    if count > limit:
        raise ConfigError(f"{option} got {count}; expected at most {limit}.")
    return count


def add_keys(folder: Path, actor_ids: Sequence[str]) -> None:
    """Of actors that the run did not have yet."""
    with disk_errors(folder, RUN_DIR):
        for actor_id in actor_ids:
            if not (folder / f"{actor_id}.json").exists():
                create_actor_key(folder, actor_id)


def refuse_fewer_steps(path: Path, steps: int, newest: int, summary: Summary | None) -> None:
    """newest: step of the newest checkpoint. The summary of a run that was killed is that of its start."""
    done = max(newest, summary.steps if summary else 0)
    if steps <= done:
        raise ConfigError(f"--steps got {steps}, but {path} has done {done} already; give a larger number.")


def refuse_other_rates(path: Path, steps: int, planned: int, schedule: str) -> None:
    if schedule != "constant":
        raise ConfigError(
            f"--steps got {steps}, but the learning rate of {path} followed a '{schedule}' schedule of {planned}"
            f" steps from the start; begin a new run with run.steps={steps}."
        )


def refuse_other_stages(path: Path, steps: int, planned: int, curriculum: CurriculumConfig) -> None:
    """A replay would begin the stages at other steps than the run did."""
    if curriculum.shares_steps:
        raise ConfigError(
            f"--steps got {steps}, but {path} has a curriculum of stages, and its stages share {planned} steps"
            f" (curriculum.stage_steps = 0); begin a new run with run.steps={steps}."
        )


def refuse_other_lag(path: Path, steps: int, planned: int, done: int, max_lag: int) -> None:
    """Step s must be sampled from version s - max_lag. Steps after the planned end were not ordered in time."""
    if steps > planned and done + max_lag > planned:
        raise ConfigError(
            f"--steps got {steps}, but {path} has done {done} of {planned} steps with pipeline.max_lag = {max_lag}: the"
            " steps that follow had to be ordered before, from earlier policies, and a replay would not match; begin a"
            f" new run with run.steps={steps}."
        )


def newest_step(run: RunDir, keep: int) -> int:
    """Of the checkpoint that the learner will start from."""
    from learner.durable.checkpoint import CheckpointStore

    newest = CheckpointStore(run.checkpoints, keep).load_latest()
    return newest.step if newest else 0


def warn_of_another_owner(run: RunDir) -> None:
    """The owner may be unable to read what root writes. Only a warning: some file systems show one owner for all."""
    owner, user = run.path.stat().st_uid, os.geteuid()
    if owner != user:
        print(
            f"warning: {run.path} belongs to user {owner}, and this is user {user}: the owner may be unable to continue"
            " the run after this; resume it as its owner.",
            file=sys.stderr,
        )


def resample(run: RunDir, step: int, last: int, keep: int) -> str:
    """Void the recorded groups of this step and later ones; returns what was done in words."""
    from learner.durable.checkpoint import CheckpointStore
    from learner.durable.resample import sample_again

    count = sample_again(run, CheckpointStore(run.checkpoints, keep), step, last)
    if count == 0:
        return f"the journal of {run.path} has no filled order of step {step} or later; nothing to void"
    return f"{count} recorded orders of step {step} and later are void and will be sampled again"


def finish_followers(run: RunDir, processes: Sequence[Process]) -> None:
    """Let tracker and evaluator do what they had not done when the run ended, for example after a second Ctrl-C."""
    if not processes:
        return
    keep_to_itself()
    followers = Followers(processes, SupervisorLimits(), print)
    try:
        followers.start_after_end()
    finally:
        followers.kill()
    # Imported late, as the display.
    from launch.commands.watch_run import write_or_warn
    from launch.display.page.command import write_report

    write_or_warn("report.html", write_report, run)


def finished(directory: Path, steps: int, *, can_be_extended: bool) -> str:
    done = f"{directory} is finished: all {steps} steps are done."
    further = next_command("resume", str(directory), "--steps", str(2 * steps))
    return f"{done} To train further: {further}" if can_be_extended else done
