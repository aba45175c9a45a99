"""rollouts.jsonl: a few groups of each step in full."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from learner.objective.batch import StepBatch
from learner.reports.run_files import RolloutLog
from protocol.messages import FilledOrder, Finish, Outcome
from shared.config.data import RewardConfig, VerifierConfig
from shared.config.processes import LogConfig
from shared.config.tree import Config, LossConfig
from shared.run.files import LineLog
from tests.support.fakes import spelled, tiny_group
from tests.support.steps import collected_of, step_batch, teaching_samples
from tests.support.wire_examples import timings

CONFIG = Config(
    loss=LossConfig(entropy_fraction=0.5),
    reward=RewardConfig(truncated=-0.25),
    verifier=VerifierConfig(on_timeout="drop"),
    log=LogConfig(rollouts_per_step=2),
)
TEACHING = tiny_group(
    [1.0, 0.0, 0.0],
    [2, 4, 3],
    group_id="train/000004/0000",
    outcomes=[Outcome.CORRECT, Outcome.WRONG, Outcome.TIMEOUT],
    finishes=[Finish.STOP, Finish.LENGTH, Finish.STOP],
)
SAME = tiny_group([1.0, 1.0], [1, 2], group_id="train/000004/0001", entropies=False)
THIRD = tiny_group([1.0, 0.0], [1, 2], group_id="train/000004/0002")


def filled_orders() -> list[FilledOrder]:
    return [
        FilledOrder(
            order_id=f"train/000004/u{index}",
            policy_version=4,
            adapter_sha256="a" * 64,
            groups=groups,
            timings=timings(),
        )
        for index, groups in enumerate([(TEACHING,), (SAME, THIRD)])
    ]


def batch() -> StepBatch:
    return step_batch(teaching_samples([TEACHING, SAME, THIRD], CONFIG), 1, CONFIG)


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def logged(path: Path, config: Config = CONFIG) -> list[dict[str, Any]]:
    RolloutLog(LineLog(path), config.log.rollouts_per_step, spelled).log(
        4, collected_of(filled_orders(), config), batch()
    )
    return rows(path)


def test_the_first_groups_of_a_step_are_written_in_full(tmp_path: Path) -> None:
    first, second = logged(tmp_path / "rollouts.jsonl")
    assert first.keys() == second.keys() == {"step", "group_id", "prompt", "samples"}
    assert (first["step"], first["group_id"], second["group_id"]) == (5, "train/000004/0000", "train/000004/0001")
    assert first["prompt"] == spelled(TEACHING.prompt_ids.tolist())
    cuts = np.split(TEACHING.completion_ids, [2, 6])
    assert TEACHING.entropies is not None
    for sample, ids, entropies in zip(first["samples"], cuts, np.split(TEACHING.entropies, [2, 6]), strict=True):
        assert sample["ids"] == ids.tolist() and sample["text"] == spelled(ids.tolist())
        assert sample["entropy"] == pytest.approx(entropies, abs=5e-5)
    assert [sample["outcome"] for sample in first["samples"]] == ["correct", "wrong", "timeout"]
    assert [sample["finish"] for sample in first["samples"]] == ["stop", "length", "stop"]
    assert [sample["reward"] for sample in first["samples"]] == [1.0, -0.25, 0.0]


def test_the_mask_is_the_one_of_the_batch(tmp_path: Path) -> None:
    first, second = logged(tmp_path / "rollouts.jsonl")
    selected = {sample.sample.name: sample.selected.astype(int).tolist() for sample in batch().samples}
    names = ["train/000004/0000[0]", "train/000004/0000[1]"]
    assert [sample["mask"] for sample in first["samples"]] == [selected[names[0]], selected[names[1]], None]
    assert 0 < sum(map(sum, selected.values())) < sum(map(len, selected.values()))
    assert [(sample["mask"], sample["entropy"]) for sample in second["samples"]] == [(None, None)] * 2


@pytest.mark.parametrize(("limit", "written"), [(0, 0), (1, 1), (3, 3), (9, 3)])
def test_as_many_as_the_config_says(limit: int, written: int, tmp_path: Path) -> None:
    config = Config(loss=CONFIG.loss, verifier=CONFIG.verifier, log=LogConfig(rollouts_per_step=limit))
    assert len(logged(tmp_path / "rollouts.jsonl", config)) == written


def test_steps_that_are_done_again_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    log = RolloutLog(LineLog(path), CONFIG.log.rollouts_per_step, spelled)
    for step in range(4):
        log.log(step, collected_of(filled_orders(), CONFIG), batch())
    log.resume_at(3)
    assert [row["step"] for row in rows(path)] == [1, 1, 2, 2]
    log.log(2, collected_of(filled_orders(), CONFIG), batch())
    assert [row["step"] for row in rows(path)] == [1, 1, 2, 2, 3, 3]
