"""Builds the curriculum of a run from [curriculum] and its tasks."""

import math
from collections.abc import Sequence

from learner.curriculum.curriculum import Curriculum, Shuffled
from learner.curriculum.pass_rate import PassRate
from learner.curriculum.semantic_entropy import (
    cache_file,
    entropy_stages,
    measured_with,
    read_entropies,
)
from learner.curriculum.stages import Staged
from learner.tasks.tasks import Task
from shared.config.data import CurriculumConfig
from shared.config.tree import Config
from shared.errors import DataError


def build_curriculum(config: Config, tasks: Sequence[Task], base_digest: str, tokenizer_digest: str) -> Curriculum:
    """The digests identify the base and the tokenizer; `sent` compares them with its cache."""
    seed, curriculum = config.run.seed, config.curriculum
    match curriculum.kind:
        case "shuffled":
            return Shuffled(len(tasks), seed)
        case "pass_rate":
            return PassRate(strata(tasks, curriculum.column), seed, curriculum)
        case "levels":
            return staged(levels(tasks, curriculum.column), curriculum, seed, config.run.steps)
        case "sent":
            wanted = measured_with(
                config.rollout, config.verifier, curriculum.samples, tasks, base_digest, tokenizer_digest
            )
            file = cache_file(curriculum, config.model, config.tasks.source, wanted)
            stages = entropy_stages(read_entropies(file, wanted).tasks, curriculum.stages)
            return staged(stages, curriculum, seed, config.run.steps)


def staged(stages: Sequence[Sequence[int]], curriculum: CurriculumConfig, seed: int, steps: int) -> Staged:
    """steps: of the run, which the stages share equally unless stage_steps is set."""
    return Staged(
        stages,
        seed,
        advance_at=curriculum.advance_at,
        stage_steps=curriculum.stage_steps or -(-steps // len(stages)),
        replay=curriculum.replay,
    )


def strata(tasks: Sequence[Task], column: str) -> list[int]:
    """[tasks] the stratum of each task: one for each value of the column, and one for tasks without it."""
    values = [task.columns.get(column, "") for task in tasks]
    number = {value: place for place, value in enumerate(dict.fromkeys(values))}
    return [number[value] for value in values]


def levels(tasks: Sequence[Task], column: str) -> list[list[int]]:
    """One list of tasks for each value of the column, in the order of the values."""
    if lacking := [task for task in tasks if column not in task.columns]:
        raise DataError(
            f"curriculum.kind = 'levels' orders tasks by column '{column}', which {len(lacking)} of {len(tasks)} tasks"
            f" lack; the first of them has {', '.join(lacking[0].columns)}: set curriculum.column."
        )
    values = sorted({task.columns[column] for task in tasks}, key=rank)
    return [[index for index, task in enumerate(tasks) if task.columns[column] == value] for value in values]


def rank(value: str) -> tuple[float, str]:
    """Sorts numbers by size, and any other text after them. Equal numbers, such as 1 and 1.0, are in the order of
    their text, so that every start of a run has the same stages."""
    try:
        number = float(value)
    except ValueError:
        number = math.inf
    return math.inf if math.isnan(number) else number, value
