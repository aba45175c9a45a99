"""Where a replay begins, and with what it compares."""

import contextlib
import json
from pathlib import Path

import pytest

from launch.commands.replay import expected_digest, first_state, run_of
from learner.durable.checkpoint import Checkpoint, CheckpointStore
from learner.durable.journal_format import Start
from shared.errors import DamageError
from shared.run.summary import Status, Summary


def store_of(folder: Path, *steps: int) -> CheckpointStore:
    store = CheckpointStore(folder, keep=len(steps))
    for step in steps:
        store.save(Checkpoint(step=step, files={}))
    return store


def test_a_whole_journal_is_replayed_from_step_0(tmp_path: Path) -> None:
    assert first_state(store_of(tmp_path, 10, 20), Start(), newest=20) is None


def test_a_shortened_one_from_the_oldest_checkpoint_that_it_reaches_back_to(tmp_path: Path) -> None:
    store = store_of(tmp_path, 10, 20, 30)
    first = first_state(store, Start(segment=3, step=11), newest=30)
    assert first is not None and first.step == 20


def test_a_journal_that_begins_behind_the_newest_checkpoint_cannot_be_replayed(tmp_path: Path) -> None:
    with pytest.raises(DamageError, match="begins with step 20, and the newest whole checkpoint is of step 10"):
        first_state(store_of(tmp_path, 10), Start(segment=3, step=20), newest=10)


def test_the_summary_counts_only_if_it_is_of_the_checkpoints_step() -> None:
    checkpoint = Checkpoint(step=10, files={"state.json": json.dumps({"adapter_sha256": "ten"}).encode()})
    cases: tuple[tuple[int, Status, str], ...] = ((10, "done", "last"), (20, "done", "ten"), (10, "running", "ten"))
    for steps, status, expected in cases:
        summary = Summary(status=status, steps=steps, wall_s=1.0, adapter_sha256="last")
        assert expected_digest(checkpoint, summary) == expected
    assert expected_digest(checkpoint, None) == "ten"


def test_the_run_of_a_batch_is_found_from_inside_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "run/quarantine"
    folder.mkdir(parents=True)
    with contextlib.chdir(folder):
        assert run_of(Path("step-000003.safetensors")).path == tmp_path / "run"
