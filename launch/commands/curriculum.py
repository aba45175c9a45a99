"""`curriculum`: measures the semantic entropy of the base on each training task, for curriculum.kind = "sent".

Samples `curriculum.samples` completions of each task from the base, scores them in killable workers as in training,
and writes the sizes of the clusters of equal final answers (learner/curriculum/semantic_entropy.py). A cache that
fits the configuration is not measured again. The run's seed has no influence, so all runs of a configuration share
one cache. After an interruption the same command measures what is left and writes the same bytes: the seeds of a task
depend on its place. A second command for the same cache waits until the first has ended.
"""

import sys
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from launch.commands.open_run import pin_cpu
from launch.presets.load import load_config
from protocol.outcome import Outcome
from shared.config.environment import check_semantic_entropy
from shared.config.tree import Config, RolloutConfig
from shared.errors import ConfigError, DataError
from shared.process.entry_point import keep_to_itself
from shared.run.file_lock import exclusive
from shared.run.files import make_folder

if TYPE_CHECKING:
    from launch.commands.in_process import LocalActor
    from learner.curriculum.semantic_entropy import Part, SemanticEntropies, TaskMeanings
    from learner.tasks.tasks import Task

LANE = "semantic entropy"
PROGRESS_S = 10.0
"""Seconds between two lines of progress."""


def measure_curriculum(*, source: str, overrides: list[str]) -> int:
    keep_to_itself()
    config = load_config(source, overrides)
    if config.verifier.kind in ("callable", "environment"):
        raise ConfigError(
            f"verifier.kind is '{config.verifier.kind}', which cannot say which final answers mean the same; semantic"
            " entropy needs 'gsm8k', 'exact' or 'math'."
        )
    check_semantic_entropy(config.environment)
    pin_cpu(config.compute, "actor")
    file, found = entropies(config)
    print("\n".join(summary(found, config.curriculum.stages)))
    print(f"written to {file}; use it with --set curriculum.kind=sent")
    return 0


def entropies(config: Config) -> "tuple[Path, SemanticEntropies]":
    """From the cache if it fits this configuration; otherwise measured, and written to the cache."""
    from launch.commands.in_process import local_actor
    from learner.curriculum.semantic_entropy import (
        KEY,
        Part,
        PartOf,
        cache_file,
        measured_with,
        read_entropies,
        remove_part,
    )
    from learner.tasks.tasks import load_tasks
    from shared.base.cache import cached_base

    with local_actor(config) as actor:
        tasks = load_tasks(config.tasks, actor.prompter, config.verifier.kind).train
        base = cached_base(config.model).digest
        samples = config.curriculum.samples
        wanted = measured_with(config.rollout, config.verifier, samples, tasks, base, actor.prompter.digest)
        file = cache_file(config.curriculum, config.model, config.tasks.source, wanted)
        make_folder(file.parent, place=KEY)
        with exclusive(file.with_name(f"{file.name}.lock"), KEY):
            try:
                found = read_entropies(file, wanted)
            except DataError as why:
                print(f"measuring: {why}", file=sys.stderr)
                with closing(Part(file, PartOf(measured_with=wanted, batch=config.rollout.prompts))) as part:
                    measure(tasks, config.rollout, samples, actor, part)
                    found = part.finish()
            remove_part(file)
    return file, found


def measure(tasks: "Sequence[Task]", rollout: RolloutConfig, samples: int, actor: "LocalActor", part: "Part") -> None:
    """In batches of as many tasks as a training step has, so that the memory is the same."""
    if part.tasks:
        print(f"{len(part.tasks)} of {len(tasks)} tasks are measured already", file=sys.stderr, flush=True)
    printed_at = time.monotonic()
    while len(part.tasks) < len(tasks):
        part.add(measure_batch(tasks, len(part.tasks), rollout, samples, actor))
        if time.monotonic() - printed_at > PROGRESS_S:
            printed_at = time.monotonic()
            print(f"{len(part.tasks)} of {len(tasks)} tasks", file=sys.stderr, flush=True)


def measure_batch(
    tasks: "Sequence[Task]", first: int, rollout: RolloutConfig, samples: int, actor: "LocalActor"
) -> "list[TaskMeanings]":
    """The `rollout.prompts` tasks from `first` on. Their seeds depend on the place of a task, not on the batch."""
    from actor.rollout import OrderScoring
    from actor.scoring.votes import clusters, comparison
    from learner.curriculum.semantic_entropy import TaskMeanings
    from learner.orders.orders import build_orders
    from protocol.messages import Sampling

    sampling = Sampling(temperature=rollout.temperature, max_new_tokens=rollout.max_new_tokens)
    orders = build_orders(
        tasks[first : first + rollout.prompts],
        seed=0,
        lane=LANE,
        step=0,
        first_slot=first,
        samples=samples,
        version=0,
        sampling=sampling,
        groups_per_order=0,
    )
    groups = tuple(group for order in orders for group in order.groups)
    begun, context = actor.scorer.begin(), actor.rollout.context
    scoring = OrderScoring(groups, begun, actor.prompter.text, lambda phase: None, context)
    completions = actor.engine.generate(groups, sampling, scoring.on_ended)
    verdicts = iter(scoring.verdicts())
    scored = [[next(verdicts) for _ in group] for group in completions]
    final_answers = [[verdict.final_answer for verdict in task] for task in scored]
    same = comparison(actor.kind, final_answers, actor.scorer)
    right = [sum(verdict.outcome is Outcome.CORRECT for verdict in task) for task in scored]
    return [TaskMeanings(clusters=clusters(a, same), right=r) for a, r in zip(final_answers, right, strict=True)]


def summary(found: "SemanticEntropies", stages: int) -> list[str]:
    """One line for all tasks, then one for each stage."""
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
