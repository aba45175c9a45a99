"""What a run may write is bounded before it trains, and a disk without that room is refused in one sentence."""

import re
from pathlib import Path

import pytest

from learner.reports.disk_need import bytes_needed, checkpoint_bytes, refuse_if_short
from shared.config.processes import CheckpointConfig, EvalConfig, JournalConfig, LogConfig, PipelineConfig
from shared.config.tree import Config, RolloutConfig, RunConfig
from shared.errors import RunDirError
from shared.run.run_dir import RunDir

ADAPTER = 1_000_000


def config(**changes: object) -> Config:
    sections = {"run": RunConfig(steps=100), "rollout": RolloutConfig(prompts=4, group=8, max_new_tokens=100)}
    return Config(**{**sections, **changes})  # type: ignore[arg-type]


def test_checkpoints_are_counted_with_those_that_are_being_written_and_removed() -> None:
    few, many = (bytes_needed(config(checkpoint=CheckpointConfig(keep=keep)), ADAPTER, 0) for keep in (1, 4))
    assert many - few == 3 * 3 * ADAPTER
    lagging = config(pipeline=PipelineConfig(max_lag=2))
    assert checkpoint_bytes(ADAPTER, lagging.pipeline.max_lag) == 5 * ADAPTER

    anchored = bytes_needed(config(checkpoint=CheckpointConfig(keep=4)), ADAPTER, 0, anchor_bytes=1000)
    assert anchored == many + 7 * 1000

    evaluation = EvalConfig(every=10, beside=True)
    waiting = bytes_needed(config(checkpoint=CheckpointConfig(keep=4), eval=evaluation), ADAPTER, 50)
    assert waiting - bytes_needed(config(checkpoint=CheckpointConfig(keep=4)), ADAPTER, 50) == 5 * 3 * ADAPTER


def test_the_journal_grows_by_every_step_that_is_left_unless_it_gives_some_up() -> None:
    silent = LogConfig(rollouts_per_step=0)
    whole, rest = (bytes_needed(config(log=silent), ADAPTER, first) for first in (0, 90))
    a_step = (whole - rest) / 90
    assert 4 * 8 * 100 * 12 < a_step < 2 * 4 * 8 * 100 * 12
    kept = config(journal=JournalConfig(keep="checkpoints"), checkpoint=CheckpointConfig(keep=1, every=2), log=silent)
    assert bytes_needed(kept, ADAPTER, 0) < whole - 90 * 4 * 8 * 100 * 12


def test_replaced_groups_and_logged_rollouts_count() -> None:
    plain = bytes_needed(config(log=LogConfig(rollouts_per_step=0)), ADAPTER, 0)
    assert bytes_needed(config(log=LogConfig(rollouts_per_step=2)), ADAPTER, 0) > plain + 100 * 2 * 8 * 100 * 20
    replaced = RolloutConfig(prompts=4, group=8, max_new_tokens=100, replacement_rounds=1)
    assert bytes_needed(config(rollout=replaced), ADAPTER, 0) > bytes_needed(config(), ADAPTER, 0) + 100 * 38_400


def test_rollouts_are_bounded_by_their_mean_size() -> None:
    none, little, much = (
        bytes_needed(config(log=LogConfig(rollouts_per_step=groups, rollouts_kb=kb)), ADAPTER, 0)
        for groups, kb in ((0, 1), (9, 1), (9, 10**6))
    )
    assert little - none == 100 * 1000
    assert much - none == 100 * 4 * 8 * 100 * 60


def test_rollouts_may_take_the_room_that_earlier_steps_left() -> None:
    none, some = (
        bytes_needed(config(log=LogConfig(rollouts_per_step=groups, rollouts_kb=1)), ADAPTER, 90) for groups in (0, 9)
    )
    assert some - none == 100 * 1000


def test_a_disk_that_is_too_small_is_refused_in_one_sentence(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run", b"{}")
    refuse_if_short(run, 2**20)
    with pytest.raises(RunDirError, match=r"may need [\d.]+ MiB and .*run has [\d.]+ MiB free; make room") as caught:
        refuse_if_short(run, 2**62)
    assert len(re.findall(r"\. [A-Z]", str(caught.value))) == 0
