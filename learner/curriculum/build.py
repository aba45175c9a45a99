"""From [curriculum] and the tasks to the curriculum of a run."""

from collections.abc import Sequence

from learner.curriculum.curriculum import Curriculum, Shuffled
from learner.curriculum.pass_rate import PassRate
from learner.curriculum.semantic_entropy import cache_file, entropy_stages, measured_with, read_entropies
from learner.curriculum.stages import Staged
from learner.tasks.tasks import Task
from shared.config.tree import Config
from shared.errors import DataError


def build_curriculum(config: Config, tasks: Sequence[Task], base_digest: str, tokenizer_digest: str) -> Curriculum:
    """One case a kind. The digests are those of what the run trains, for `sent` to compare with its cache."""
    seed, curriculum = config.run.seed, config.curriculum
    match curriculum.kind:
        case "shuffled":
            return Shuffled(len(tasks), seed)
        case "pass_rate":
            return PassRate(strata(tasks, curriculum.column), seed, curriculum)
        case "levels":
            return staged(levels(tasks, curriculum.column), config)
        case "sent":
            wanted = measured_with(config, tasks, base_digest, tokenizer_digest)
            return staged(entropy_stages(read_entropies(cache_file(config), wanted).tasks, curriculum.stages), config)


def staged(stages: Sequence[Sequence[int]], config: Config) -> Staged:
    """These stages with the config's rule for moving on."""
    curriculum = config.curriculum
    return Staged(
        stages,
        config.run.seed,
        advance_at=curriculum.advance_at,
        stage_steps=curriculum.stage_steps or -(-config.run.steps // len(stages)),
        replay=curriculum.replay,
    )


def strata(tasks: Sequence[Task], column: str) -> list[int]:
    """[tasks] the number of each task's value in the column; tasks without it have one of their own."""
    values = [task.columns.get(column, "") for task in tasks]
    number = {value: place for place, value in enumerate(dict.fromkeys(values))}
    return [number[value] for value in values]


def levels(tasks: Sequence[Task], column: str) -> list[list[int]]:
    """The tasks of each value in the column, in the order of the values."""
    if lacking := [task for task in tasks if column not in task.columns]:
        raise DataError(
            f"curriculum.kind = 'levels' orders tasks by column '{column}', which {len(lacking)} of {len(tasks)} tasks"
            f" lack; the first of them has {', '.join(lacking[0].columns)}: set curriculum.column."
        )
    values = sorted({task.columns[column] for task in tasks}, key=rank)
    return [[index for index, task in enumerate(tasks) if task.columns[column] == value] for value in values]


def rank(value: str) -> tuple[float, str]:
    """Numbers by size, before anything else by its letters."""
    try:
        return float(value), ""
    except ValueError:
        return float("inf"), value
