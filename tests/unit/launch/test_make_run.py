"""A run directory is made whole or is no run: at any error of the disk, and after a kill at any point."""

import contextlib
import errno
import os
import re
from functools import partial
from pathlib import Path

import pytest
from msgspec.structs import replace

from launch.__main__ import main
from launch.commands.run import describe, make_run
from launch.supervisor.topology import topology
from protocol.access.keys import load_learner_keys
from shared.config.data import VerifierConfig
from shared.config.tree import Config
from shared.errors import RunDirError
from shared.run.run_dir import RunDir, make_free_folder
from tests.support.disk_faults import failing, kill_before_every_call, list_calls


def prepare(folder: Path) -> None:
    folder.mkdir()


def make(folder: Path) -> None:
    make_run(folder / "run", Config())


def is_whole(path: Path) -> bool:
    """A folder that passes for a run has all that its processes need."""
    try:
        run = RunDir.open(path)
    except RunDirError:
        return False
    load_learner_keys(run.keys)
    assert run.read_info().run_id
    return True


def test_killed_anywhere_it_is_a_whole_run_or_none(tmp_path: Path) -> None:
    folders = kill_before_every_call(prepare, make, tmp_path)
    whole = [is_whole(folder / "run") for folder in folders]
    assert whole == sorted(whole) and whole[0] is False and whole[-1] is True
    for folder in folders[: whole.index(True)]:
        make(folder)
        assert is_whole(folder / "run") and not list((folder / "run").glob(".*")), "it can be tried again"


def fail_at_start(folder: Path) -> None:
    make(folder)
    run = RunDir(folder / "run")
    run.plan.write_text("old")
    (run.logs / "learner.log").write_text("old")
    run.summary.write_text('{"status": "failed"}')


def test_killed_while_it_replaces_a_run_that_failed_it_can_be_tried_again(tmp_path: Path) -> None:
    folders = kill_before_every_call(fail_at_start, make, tmp_path)
    for folder in folders:
        if not (new := is_whole(folder / "run")) or RunDir(folder / "run").failed_at_start():
            make(folder)
        assert is_whole(folder / "run") and not RunDir(folder / "run").plan.exists()
        assert new or not list((folder / "run").glob(".*"))


@pytest.mark.parametrize("refusal", [errno.ENOSPC, errno.EIO])
def test_any_refusal_is_one_sentence_or_did_not_matter(tmp_path: Path, refusal: int) -> None:
    calls: list[str] = []
    for name in ("warm", "listed"):
        (tmp_path / name).mkdir()
        calls = list_calls(partial(make, tmp_path / name))
    sites = [(name, nth) for name in sorted({*calls} - {"unlink"}) for nth in range(1, calls.count(name) + 1)]
    said = [refused(tmp_path / f"{name}-{nth}", name, nth, refusal) for name, nth in sites]
    assert len(sites) > 30 and said.count("") <= 1, "only the second making of a folder is let go"
    assert all(re.fullmatch(r"/\S+ cannot be used \(.+\); .+\.", sentence) for sentence in said if sentence)


def refused(folder: Path, name: str, nth: int, refusal: int) -> str:
    """What is said when this call fails; nothing where the run is whole all the same."""
    folder.mkdir()
    try:
        with failing(name, refusal, nth=nth):
            make(folder)
    except RunDirError as error:
        if not is_whole(folder / "run"):
            make(folder)
            assert is_whole(folder / "run"), "it can be tried again"
        return str(error)
    assert is_whole(folder / "run")
    return ""


@pytest.mark.parametrize("name", ["keys/mine", "start/adapter.safetensors", "run.json", "lock", ".start.12345678.tmp"])
def test_files_that_only_look_like_ours_are_left_alone(name: str, tmp_path: Path) -> None:
    file = tmp_path / "run" / name
    file.parent.mkdir(parents=True)
    file.write_text("mine")
    with pytest.raises(RunDirError, match="is not empty and has no run"):
        make(tmp_path)
    assert [path for path in (tmp_path / "run").rglob("*") if path.is_file()] == [file]


def test_what_a_user_put_into_a_run_that_was_cut_short_is_left_alone(tmp_path: Path) -> None:
    with pytest.raises(RunDirError), failing("rename", errno.ENOSPC):
        make(tmp_path)
    (tmp_path / "run" / "notes.txt").write_text("mine")
    before = sorted((tmp_path / "run").rglob("*"))
    with pytest.raises(RunDirError, match="is not empty and has no run"):
        make(tmp_path)
    assert sorted((tmp_path / "run").rglob("*")) == before


def test_a_run_that_another_process_makes_is_in_use(tmp_path: Path) -> None:
    with pytest.raises(RunDirError), failing("rename", errno.ENOSPC):
        make(tmp_path)
    with RunDir(tmp_path / "run").lock_held(), pytest.raises(RunDirError, match=f"is in use by process {os.getpid()}"):
        make(tmp_path)
    assert (tmp_path / "run" / "keys" / "learner.json").exists()


def test_no_run_is_made_of_what_its_processes_would_refuse(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sft", "calculator", "--prepare", "--out", str(tmp_path / "warm")]) == 2
    assert "written answers and no environment; give it a file without [environment]" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_runs_of_the_same_second_have_folders_of_their_own(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "embedded-20260102-030405"
    made = [make_run(make_free_folder(folder), Config()).path for _ in range(3)]
    assert made == [folder, folder.with_name(f"{folder.name}-2"), folder.with_name(f"{folder.name}-3")]
    assert all(map(is_whole, made))


def test_without_out_each_run_has_its_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.chdir(tmp_path):
        for _ in range(2):
            assert main(["run", "--prepare"]) == 0
    said = [line.partition(" is prepared")[0] for line in capsys.readouterr().out.splitlines()]
    assert len({*said}) == 2 and all(is_whole(tmp_path / path) for path in said)


@pytest.mark.parametrize("words", [["--dry-run"], ["--prepare"], []])
def test_a_folder_that_is_taken_is_refused_before_anything_is_planned(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make(tmp_path)
    assert main(["run", *words, "--out", str(tmp_path / "run")]) == 2
    said = capsys.readouterr()
    assert "has a run that has not begun; begin it with `resume`" in said.err and said.out == ""


@pytest.mark.parametrize(("correct", "said"), [("", True), ("right", False)])
def test_the_plan_says_that_a_sum_of_rewards_decides_what_is_correct(correct: str, said: bool, tmp_path: Path) -> None:
    verifier = VerifierConfig(kind="callable", rewards={"a.py:right": 2.0, "a.py:form": 0.5}, correct=correct)
    config = replace(Config(), verifier=verifier)
    plan = describe(topology(tmp_path / "run", config), config)
    assert "rewards        reward functions get prompts and completions as lists of messages" in plan
    assert ("rewards        a completion counts as correct if the weighted sum" in plan) == said
