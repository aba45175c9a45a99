"""Checkpoints are whole or not there; a changed byte is found; a crash between any two calls loses nothing."""

import errno
import json
import logging
from pathlib import Path

import pytest

from learner.durable.checkpoint import Checkpoint, CheckpointStore, pack_manifest
from shared.errors import DamageError, RunDirError
from tests.support.disk_faults import failing, kill_before_every_call


def checkpoint(step: int, note: bytes = b"") -> Checkpoint:
    files = {
        "adapter_model.safetensors": b"weights %d" % step + note,
        "state.json": b'{"step":%d}' % step,
        "empty": b"",
    }
    return Checkpoint(step=step, files=files)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_nothing_there_is_none_and_makes_nothing(tmp_path: Path) -> None:
    assert CheckpointStore(tmp_path / "none", keep=3).load_latest() is None
    assert not (tmp_path / "none").exists()


def test_saved_is_loaded_newest_first_or_by_step(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", keep=3)
    for step in (9, 10, 1_000_000):
        store.save(checkpoint(step))
    assert store.load_latest() == checkpoint(1_000_000)
    assert store.load(10) == checkpoint(10)
    assert names(tmp_path / "checkpoints") == ["step-000009", "step-000010", "step-1000000"]
    with pytest.raises(RunDirError, match=r"no checkpoint of step 11; there are: 9, 10, 1000000\."):
        store.load(11)
    with pytest.raises(RunDirError, match=r"there are: none\."):
        CheckpointStore(tmp_path / "none", keep=3).load(1)


def test_files_lie_flat_for_other_tools(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    store.save(checkpoint(10))
    assert (store.path(10) / "adapter_model.safetensors").read_bytes() == b"weights 10"
    manifest = json.loads((store.path(10) / "MANIFEST.json").read_bytes())
    assert manifest["step"] == 10
    assert manifest["files"]["empty"]["num_bytes"] == 0


def test_every_changed_byte_of_every_file_is_found_and_the_previous_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = CheckpointStore(tmp_path, keep=3)
    store.save(checkpoint(1))
    store.save(checkpoint(2))
    for file in sorted(store.path(2).iterdir()):
        data = file.read_bytes()
        for position in range(len(data)):
            for bit in (0, 7):
                changed = bytearray(data)
                changed[position] ^= 1 << bit
                file.write_bytes(changed)
                caplog.clear()
                assert store.load_latest() == checkpoint(1)
                [record] = caplog.records
                assert record.levelno == logging.WARNING
                assert str(file) in record.getMessage()
                assert record.getMessage().endswith("the checkpoint of step 1 is used instead.")
        file.write_bytes(data)
    assert store.load_latest() == checkpoint(2)


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "empty", "MANIFEST.json"])
def test_missing_shortened_or_longer_files_are_damage(tmp_path: Path, name: str) -> None:
    store = CheckpointStore(tmp_path, keep=3)
    store.save(checkpoint(1))
    file = store.path(1) / name
    data = file.read_bytes()
    for content in (None, data + b"\n", data[:-1]):
        file.unlink()
        if content is not None:
            file.write_bytes(content)
        if content != data:
            with pytest.raises(DamageError, match=f"{name} .*; restore it from a copy, or choose another step"):
                store.load(1)
        file.write_bytes(data)
    assert store.load(1) == checkpoint(1)


def test_all_damaged_is_an_error_that_names_each(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=3)
    for step in (1, 2):
        store.save(checkpoint(step))
        (store.path(step) / "state.json").write_bytes(b"")
    with pytest.raises(DamageError, match=r"No checkpoint in .* is whole .*step-000002.*step-000001.*restore one"):
        store.load_latest()


@pytest.mark.parametrize("name", ["../../config.json", "sub/file", "..", "/etc/hostname", ""])
def test_a_manifest_that_names_files_elsewhere_is_damage(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_bytes(b"{}")
    store = CheckpointStore(tmp_path / "checkpoints", keep=3)
    store.save(checkpoint(1))
    forged = pack_manifest(1, {name: (b"{}",)})
    (store.path(1) / "MANIFEST.json").write_bytes(forged)
    with pytest.raises(DamageError, match="names a file that is not in its folder"):
        store.load(1)


def test_a_folder_under_another_steps_name_is_damage(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=3)
    store.save(checkpoint(1))
    store.path(1).rename(store.path(2))
    with pytest.raises(DamageError, match=r"step-000002 has the checkpoint of step 1"):
        store.load(2)


def test_keeps_the_newest_and_the_one_that_is_named(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for step in range(1, 8):
        store.save(checkpoint(step), keep_also={4} if step > 4 else ())
    assert names(tmp_path) == ["step-000004", "step-000006", "step-000007"]
    store.save(checkpoint(8))
    assert names(tmp_path) == ["step-000007", "step-000008"]


def test_after_a_fall_back_the_step_just_saved_is_never_pruned(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    store.save(checkpoint(10))
    store.save(checkpoint(30), keep_also={10})
    (store.path(30) / "state.json").write_bytes(b"rot")
    assert store.load_latest() == checkpoint(10)
    store.save(checkpoint(20), keep_also={10})
    assert store.load_latest() == checkpoint(20)
    store.save(checkpoint(30), keep_also={10})
    assert store.load_latest() == checkpoint(30)
    assert names(tmp_path) == ["step-000010", "step-000030"]


def test_a_step_saved_again_replaces_it_whole(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    store.save(checkpoint(1))
    (store.path(1) / "stray").write_bytes(b"x")
    store.save(checkpoint(1, b"again"))
    assert store.load_latest() == checkpoint(1, b"again")
    assert "stray" not in names(store.path(1))


def test_the_same_state_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in "ab":
        CheckpointStore(tmp_path / name, keep=1).save(checkpoint(1))
    manifests = [(tmp_path / name / "step-000001" / "MANIFEST.json").read_bytes() for name in "ab"]
    assert manifests[0] == manifests[1]


def prepare_two(folder: Path) -> None:
    """The best is 1."""
    store = CheckpointStore(folder, keep=1)
    store.save(checkpoint(1))
    store.note_best(1, 0.9)
    store.save(checkpoint(2), keep_also={1})


def save_second_and_third(folder: Path) -> None:
    """2 once more, as after a crash, then 3, which prunes 2."""
    store = CheckpointStore(folder, keep=1)
    store.save(checkpoint(2), keep_also={1})
    store.save(checkpoint(3), keep_also={1})


def test_saving_killed_anywhere_never_loses_ground(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    steps: list[int] = []
    for folder in kill_before_every_call(prepare_two, save_second_and_third, tmp_path):
        before = names(folder)
        loaded = CheckpointStore(folder, keep=1).load_latest()
        assert loaded is not None
        assert loaded in (checkpoint(2), checkpoint(3))
        steps.append(loaded.step)
        assert names(folder) == before, "loading changes nothing"

        CheckpointStore(folder, keep=1).save(checkpoint(3), keep_also={1})
        assert names(folder) == ["best.json", "step-000001", "step-000003"], "what the crash left is cleaned"
        assert json.loads((folder / "best.json").read_bytes()) == {"step": 1, "accuracy": 0.9}
    assert steps == sorted(steps)
    assert set(steps) == {2, 3}
    assert caplog.records == []


@pytest.mark.parametrize("call", ["mkdir", "open", "write", "fsync", "rename"])
def test_a_full_disk_keeps_what_was_saved(tmp_path: Path, call: str) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    store.save(checkpoint(1))
    with pytest.raises(RunDirError, match="free some space"), failing(call, errno.ENOSPC):
        store.save(checkpoint(2))
    assert store.load_latest() == checkpoint(1)
    store.save(checkpoint(2))
    assert names(tmp_path) == ["step-000002"]


def test_foreign_entries_are_ignored(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "step-7").mkdir()
    store.save(checkpoint(1))
    assert store.load_latest() == checkpoint(1)
    assert names(tmp_path) == ["notes.txt", "step-000001", "step-7"]


def test_the_best_one_can_be_asked_for_once_there_is_one(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    store.save(Checkpoint(step=2, files={"a": b"2"}))
    with pytest.raises(RunDirError, match=r"no best checkpoint: none was evaluated .* Set eval\.every in"):
        store.load_best()
    store.note_best(2, 0.9)
    store.save(Checkpoint(step=3, files={"a": b"3"}), keep_also={2})
    assert store.load_best() == Checkpoint(step=2, files={"a": b"2"})
    assert json.loads((tmp_path / "best.json").read_bytes()) == {"step": 2, "accuracy": 0.9}


def test_the_oldest_whole_one_from_a_step_on(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=3)
    assert (store.load_oldest(0), store.oldest_kept(0)) == (None, 0)
    for step in (10, 20, 30):
        assert store.oldest_kept(step - 10) == 0
        store.save(checkpoint(step))
    assert [store.oldest_kept(saved) for saved in (20, 30)] == [0, 10]
    assert (store.load_oldest(0), store.load_oldest(11), store.load_oldest(31)) == (
        checkpoint(10),
        checkpoint(20),
        None,
    )
    (store.path(20) / "empty").write_bytes(b"no more")
    assert store.load_oldest(11) == checkpoint(30)


@pytest.mark.parametrize("content", [b"", b"\xff", b"{}", b"[]", b'{"step": '])
def test_a_damaged_note_of_the_best_is_told(tmp_path: Path, content: bytes) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    store.save(checkpoint(1))
    (tmp_path / "best.json").write_bytes(content)
    with pytest.raises(DamageError, match=r"best\.json does not name a checkpoint"):
        store.load_best()
