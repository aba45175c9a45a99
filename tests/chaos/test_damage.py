"""Bytes that change on the disk are found in every file; the error names place and remedy, and the remedy works."""

import json
import random
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from learner.durable.checkpoint import CheckpointStore
from learner.durable.journal import Journal
from tests.chaos.pool import Pool
from tests.chaos.trial import Result, Trial, check
from tests.support.runs import launch, summary

POSITIONS = 24
"""Of each file; the unit tests of the store go through every byte of small ones."""


@pytest.fixture(scope="module")
def finished(hosts: Pool, prepared: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that is done; treat it as read-only."""
    kept = tmp_path_factory.mktemp("finished") / "run"
    result = hosts.run_one(Trial(name="finished", run=prepared, keep=str(kept)))
    assert not result.error, result.error
    return kept


@pytest.fixture
def unfinished(finished: Path, tmp_path: Path) -> Path:
    """A copy that was killed after its last step, before it could say so."""
    copy = tmp_path / "run"
    shutil.copytree(finished, copy)
    ended = summary(copy)
    (copy / "summary.json").write_text(json.dumps(ended | {"status": "running"}))
    return copy


def flip(file: Path, position: int, bit: int = 0) -> None:
    data = bytearray(file.read_bytes())
    data[position] ^= 1 << bit
    file.write_bytes(data)


def newest(run: Path) -> Path:
    return max((run / "checkpoints").glob("step-*"))


def test_a_flipped_bit_anywhere_in_a_checkpoint_is_found_and_the_one_before_it_used(
    unfinished: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store, rng = CheckpointStore(unfinished / "checkpoints", keep=2), random.Random(1)
    files = sorted(newest(unfinished).iterdir())
    assert len(files) >= 5
    for file in files:
        size = file.stat().st_size
        for position in {0, size - 1, *(rng.randrange(size) for _ in range(POSITIONS))}:
            bit = rng.randrange(8)
            flip(file, position, bit)
            caplog.clear()
            loaded = store.load_latest()
            assert loaded and loaded.step == 4
            assert f"{file} " in caplog.text and "the checkpoint of step 4 is used instead" in caplog.text
            flip(file, position, bit)
    loaded = store.load_latest()
    assert loaded and loaded.step == 5


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["adapter_model.safetensors", "optimizer.safetensors", "state.json", "MANIFEST.json"])
def test_a_run_goes_on_from_the_checkpoint_before_a_damaged_one_says_so_and_ends_the_same(
    unfinished: Path, undisturbed: Result, hosts: Pool, tmp_path: Path, name: str
) -> None:
    flip(newest(unfinished) / name, 100)
    kept = tmp_path / "kept"
    result = hosts.run_one(Trial(name=f"damaged-{name}", run=str(unfinished), keep=str(kept)))
    check(result, undisturbed)
    assert "the checkpoint of step 4 is used instead" in (kept / "logs" / "learner.log").read_text()


@pytest.mark.timeout(600)
def test_damage_in_the_middle_of_the_journal_names_the_steps_and_the_way_out_works(
    unfinished: Path, undisturbed: Result
) -> None:
    segment = unfinished / "journal" / "000001.log"
    record = Journal.read(unfinished / "journal").segments[0].records[4]
    flip(segment, (record.start + record.end) // 2)
    done = launch("resume", unfinished)
    assert done.returncode == 2 and "Traceback" not in done.stdout + done.stderr
    for part in (
        "record 4 ",
        "The 4 records before it are whole, up to order train/000001",
        "of step 2",
        "newest checkpoint is of step 5",
    ):
        assert part in done.stderr, done.stderr
    command = re.search(r"`(truncate [^`]+)`", done.stderr)
    assert command
    subprocess.run(command[1].split(), check=True)
    resumed = launch("resume", unfinished)
    assert resumed.returncode == 0, resumed.stderr
    assert summary(unfinished)["adapter_sha256"] == undisturbed.outcome["adapter_sha256"]


@pytest.mark.timeout(600)
def test_with_the_journal_cut_and_no_checkpoint_whole_the_same_groups_are_sampled_again(
    unfinished: Path, undisturbed: Result, hosts: Pool
) -> None:
    segment = unfinished / "journal" / "000001.log"
    record = Journal.read(unfinished / "journal").segments[0].records[4]
    with segment.open("r+b") as file:
        file.truncate(record.start - 20)
    shutil.rmtree(unfinished / "checkpoints")
    check(hosts.run_one(Trial(name="cut", run=str(unfinished))), undisturbed)
