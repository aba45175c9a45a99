"""From a config to the curriculum it means."""

from itertools import permutations
from pathlib import Path

import msgspec
import numpy as np
import pytest

from learner.curriculum.build import build_curriculum, levels, rank, strata
from learner.curriculum.curriculum import Curriculum, Shuffled
from learner.curriculum.pass_rate import PassRate
from learner.curriculum.semantic_entropy import SemanticEntropies, TaskMeanings, measured_with
from learner.curriculum.stages import Staged
from learner.tasks.tasks import Task
from shared.config.data import CurriculumConfig
from shared.config.tree import Config, RunConfig
from shared.errors import DataError
from tests.support.fakes import toy_tasks


def task(**columns: str) -> Task:
    return Task(prompt_ids=np.array([1], np.int32), columns={"question": "?", **columns})


def config(**keys: object) -> Config:
    return Config(run=RunConfig(steps=10, seed=4), curriculum=CurriculumConfig(**keys))  # pyright: ignore


def built(config: Config, tasks: list[Task]) -> Curriculum:
    return build_curriculum(config, tasks, base_digest="b" * 64, tokenizer_digest="t" * 64)


def test_each_kind() -> None:
    tasks = [task(level=level) for level in "1223"]
    assert isinstance(built(config(kind="shuffled"), tasks), Shuffled)
    by_rate = built(config(kind="pass_rate"), tasks)
    assert isinstance(by_rate, PassRate)
    assert by_rate.strata.tolist() == [0, 1, 1, 2]
    by_level = built(config(kind="levels", advance_at=0.5, replay=0.25), tasks)
    assert isinstance(by_level, Staged)
    assert (by_level.stages, by_level.advance_at, by_level.replay) == ([[0], [1, 2], [3]], 0.5, 0.25)


def test_without_a_number_of_steps_the_stages_share_the_run() -> None:
    tasks = [task(level=level) for level in "123"]
    by_level = built(config(kind="levels"), tasks)
    assert isinstance(by_level, Staged) and by_level.stage_steps == 4
    by_level = built(config(kind="levels", stage_steps=7), tasks)
    assert isinstance(by_level, Staged) and by_level.stage_steps == 7


def test_levels_are_in_the_order_of_numbers_then_of_letters() -> None:
    tasks = [task(level=level) for level in ("10", "9", "Level 2", "Level 1", "9")]
    assert levels(tasks, "level") == [[1, 4], [0], [3], [2]]


@pytest.mark.parametrize("values", [("1", "01", "1.0"), ("nan", "2", "1", "A")])
def test_values_without_an_order_of_size_are_in_one_order(values: tuple[str, ...]) -> None:
    """The values are met as a set, whose order is another one in each process."""
    expected = {"1": ["01", "1", "1.0"], "nan": ["1", "2", "A", "nan"]}[values[0]]
    for order in permutations(values):
        assert sorted(order, key=rank) == expected


def test_tasks_without_the_column_share_a_stratum_and_have_no_level() -> None:
    assert strata(toy_tasks(3), "level") == [0, 0, 0]
    with pytest.raises(DataError, match=r"by column 'level', which 2 of 3 tasks lack; the first of them has question"):
        levels([task(level="1"), *toy_tasks(2)], "level")


def test_stages_of_rising_entropy_from_a_cache_that_fits(tmp_path: Path) -> None:
    tasks = [task(level=level) for level in "1223"]
    sent = config(kind="sent", stages=2, cache=str(tmp_path / "se.json"))
    with pytest.raises(DataError, match=r"needs semantic entropies in .*se\.json, which is not there"):
        built(sent, tasks)
    measured_tasks = [TaskMeanings(clusters=clusters, right=3) for clusters in ((4, 4), (8,), (5, 1, 1, 1), (7, 1))]
    measured = measured_with(sent.rollout, sent.verifier, sent.curriculum.samples, tasks, "b" * 64, "t" * 64)
    found = SemanticEntropies(measured_with=measured, tasks=tuple(measured_tasks))
    (tmp_path / "se.json").write_bytes(msgspec.json.encode(found))
    by_entropy = built(sent, tasks)
    assert isinstance(by_entropy, Staged) and by_entropy.stages == [[1, 3], [0, 2]]
    with pytest.raises(DataError, match="are of another data"):
        built(sent, tasks[:3])
