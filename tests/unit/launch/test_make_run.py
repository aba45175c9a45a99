"""A run directory is made whole or is no run: at any error of the disk, and after a kill at any point."""

import errno
import re
from functools import partial
from pathlib import Path

import pytest

from launch.__main__ import main
from launch.commands.run import make_run
from protocol.access.keys import load_learner_keys
from shared.config.tree import Config
from shared.errors import RunDirError
from shared.run.run_dir import RunDir
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
    whole = [is_whole(folder / "run") for folder in kill_before_every_call(prepare, make, tmp_path)]
    assert whole == sorted(whole) and whole[0] is False and whole[-1] is True


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
        return str(error)
    assert is_whole(folder / "run")
    return ""


def test_no_run_is_made_of_what_its_processes_would_refuse(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sft", "calculator", "--prepare", "--out", str(tmp_path / "warm")]) == 2
    assert "written answers and no environment; give it a file without [environment]" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
