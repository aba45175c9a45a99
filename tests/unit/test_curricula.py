"""From a config to the curriculum it means."""

import numpy as np
import pytest

from learner.curricula import build_curriculum, levels, strata
from learner.curriculum import Shuffled
from learner.pass_rate import PassRate
from learner.stages import Staged
from learner.tasks import Task
from shared.config import Config, CurriculumConfig, RunConfig
from shared.errors import DataError
from tests.fakes import toy_tasks


def task(**columns: str) -> Task:
    return Task(prompt_ids=np.array([1], np.int32), columns={"question": "?", **columns})


def config(**keys: object) -> Config:
    return Config(run=RunConfig(steps=10, seed=4), curriculum=CurriculumConfig(**keys))  # pyright: ignore


def test_each_kind() -> None:
    tasks = [task(level=level) for level in "1223"]
    assert isinstance(build_curriculum(config(kind="shuffled"), tasks), Shuffled)
    by_rate = build_curriculum(config(kind="pass_rate"), tasks)
    assert isinstance(by_rate, PassRate)
    assert by_rate.strata.tolist() == [0, 1, 1, 2]
    by_level = build_curriculum(config(kind="levels", advance_at=0.5, replay=0.25), tasks)
    assert isinstance(by_level, Staged)
    assert (by_level.stages, by_level.advance_at, by_level.replay) == ([[0], [1, 2], [3]], 0.5, 0.25)


def test_without_a_number_of_steps_the_stages_share_the_run() -> None:
    tasks = [task(level=level) for level in "123"]
    by_level = build_curriculum(config(kind="levels"), tasks)
    assert isinstance(by_level, Staged) and by_level.stage_steps == 4
    by_level = build_curriculum(config(kind="levels", stage_steps=7), tasks)
    assert isinstance(by_level, Staged) and by_level.stage_steps == 7


def test_levels_are_in_the_order_of_numbers_then_of_letters() -> None:
    tasks = [task(level=level) for level in ("10", "9", "Level 2", "Level 1", "9")]
    assert levels(tasks, "level") == [[1, 4], [0], [3], [2]]


def test_tasks_without_the_column_share_a_stratum_and_have_no_level() -> None:
    assert strata(toy_tasks(3), "level") == [0, 0, 0]
    with pytest.raises(DataError, match=r"by column 'level', which 2 of 3 tasks lack; the first of them has question"):
        levels([task(level="1"), *toy_tasks(2)], "level")
