"""`curriculum`: measures how undecided the base is about each training task, for curriculum.kind = "sent".

Samples `curriculum.samples` answers of each task from the base as in training, scores them in killable workers, and
keeps the sizes of the clusters (learner/curriculum/semantic_entropy.py). A cache that fits is not measured again. The
answers are
the same whatever the run's seed, so all runs of one configuration share a cache.
"""

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from launch.preset import load_config
from protocol.outcome import Outcome
from shared.config.tree import Config
from shared.errors import ConfigError, DataError
from shared.process.determinism import cpu_environment
from shared.run.files import make_folder, write_whole

if TYPE_CHECKING:
    from launch.commands.in_process import LocalActor
    from learner.curriculum.semantic_entropy import SemanticEntropies, TaskMeanings
    from learner.tasks.tasks import Task

LANE = "semantic entropy"
SAID_EVERY_S = 10.0


def run_command(*, source: str, overrides: list[str]) -> int:
    """Measure, keep, tell."""
    config = load_config(source, overrides)
    if config.verifier.kind == "callable":
        raise ConfigError(
            "verifier.kind is 'callable', which tells right from wrong but not which answers mean the same; semantic"
            " entropy needs 'gsm8k', 'exact' or 'math'."
        )
    os.environ.update(cpu_environment(config.compute.actor_threads, config.compute.blas))
    file, found = entropies(config)
    print("\n".join(summary(found, config.curriculum.stages)))
    print(f"kept in {file}; use it with --set curriculum.kind=sent")
    return 0


def entropies(config: Config) -> "tuple[Path, SemanticEntropies]":
    """From the cache where it fits, else measured and written there."""
    from launch.commands.in_process import local_actor
    from learner.curriculum.semantic_entropy import SemanticEntropies, cache_file, measured_with, read_entropies
    from learner.tasks.tasks import load_tasks
    from shared.model.base_cache import cached_base

    file = cache_file(config.curriculum, config.model, config.tasks.source)
    with local_actor(config) as actor:
        tasks = load_tasks(config.tasks, actor.prompter, config.verifier.kind).train
        base = cached_base(config.model).digest
        samples = config.curriculum.samples
        wanted = measured_with(config.rollout, config.verifier, samples, tasks, base, actor.prompter.digest)
        try:
            return file, read_entropies(file, wanted)
        except DataError as why:
            print(f"measuring: {why}", file=sys.stderr)
        found = SemanticEntropies(measured_with=wanted, tasks=tuple(measure(config, tasks, actor)))
    make_folder(file.parent)
    write_whole(file, msgspec.json.encode(found))
    return file, found


def measure(config: Config, tasks: "Sequence[Task]", actor: "LocalActor") -> "list[TaskMeanings]":
    """All tasks, as many at a time as a training step has."""
    found: list[TaskMeanings] = []
    said = time.monotonic()
    while len(found) < len(tasks):
        found += measure_some(config, tasks, len(found), actor)
        if time.monotonic() - said > SAID_EVERY_S:
            said = time.monotonic()
            print(f"{len(found)} of {len(tasks)} tasks", file=sys.stderr, flush=True)
    return found


def measure_some(config: Config, tasks: "Sequence[Task]", first: int, actor: "LocalActor") -> "list[TaskMeanings]":
    """The tasks from `first` on."""
    from actor.rollout import Marking
    from launch.commands.in_process import clusters, comparison
    from learner.curriculum.semantic_entropy import TaskMeanings
    from learner.orders.orders import build_orders
    from protocol.messages import Sampling

    (order,) = build_orders(
        tasks[first : first + config.rollout.prompts],
        seed=0,
        lane=LANE,
        step=0,
        first_slot=first,
        samples=config.curriculum.samples,
        version=0,
        sampling=Sampling(temperature=config.rollout.temperature, max_new_tokens=config.rollout.max_new_tokens),
        groups_per_order=0,
    )
    scorer = actor.ballots.scorer
    marking = Marking(order.groups, scorer.begin(), actor.prompter.text, lambda phase: None)
    completions = actor.engine.generate(order.groups, order.sampling, marking.heard)
    verdicts = iter(marking.verdicts())
    scored = [[next(verdicts) for _ in samples] for samples in completions]
    answers = [[verdict.extracted for verdict in task] for task in scored]
    same = comparison(config.verifier.kind, answers, scorer)
    right = [sum(verdict.outcome is Outcome.CORRECT for verdict in task) for task in scored]
    return [TaskMeanings(clusters=clusters(a, same), right=r) for a, r in zip(answers, right, strict=True)]


def summary(found: "SemanticEntropies", stages: int) -> list[str]:
    """What came out, and the stages it would make."""
    from statistics import fmean

    from learner.curriculum.semantic_entropy import entropy_stages

    tasks = found.tasks
    always = sum(task.right == sum(task.clusters) for task in tasks)
    never = sum(task.right == 0 for task in tasks)
    lines = [
        f"{len(tasks)} tasks, {found.measured_with.sampling}: {always} always right, {never} never; these are left out"
    ]
    for number, stage in enumerate(entropy_stages(tasks, stages)):
        chosen = [tasks[task] for task in stage]
        rate = fmean(task.right / sum(task.clusters) for task in chosen)
        span = f"{min(task.entropy for task in chosen):.2f} to {max(task.entropy for task in chosen):.2f} nats"
        lines.append(f"stage {number}: {len(stage)} tasks, entropy {span}, right {rate:.0%}")
    return lines
