"""What a process's end means, also when it had no room to say so."""

import sys
import time
from pathlib import Path

import pytest

from launch.supervisor.child import Child
from launch.supervisor.endings import failure
from launch.supervisor.starter import FreshStarter
from launch.supervisor.topology import Process, ProcessFailed
from shared.errors import RunDirError, UserError


def ended(log: Path, code: str) -> tuple[Child, int]:
    """A child that ran this and is gone."""
    process = Process(name="learner", argv=(sys.executable, "-c", code), environment={}, threads=1, log=log)
    child = Child(process, FreshStarter())
    while (exit_code := child.exit_code()) is None:
        time.sleep(0.01)
    return child, exit_code


def test_a_sentence_is_passed_on_and_anything_else_is_a_crash(tmp_path: Path) -> None:
    said = failure(*ended(tmp_path / "a.log", "print('error: give more.'); raise SystemExit(2)"), steps_done=3)
    assert isinstance(said, UserError) and str(said) == "give more."
    crash = failure(*ended(tmp_path / "b.log", "print('oops'); raise SystemExit(1)"), steps_done=3)
    assert isinstance(crash, ProcessFailed) and "exit code 1 after step 3" in str(crash) and "oops" in str(crash)


def test_code_2_without_a_sentence_names_the_disk_of_the_log(tmp_path: Path) -> None:
    error = failure(*ended(tmp_path / "a.log", "raise SystemExit(2)"), steps_done=3)
    assert isinstance(error, UserError)
    for part in ("learner stopped", str(tmp_path / "a.log"), "KiB free", "make room", "`resume`"):
        assert part in str(error)


def test_a_log_that_cannot_be_opened_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file where the folder should be")
    with pytest.raises(RunDirError, match="choose an --out"):
        ended(tmp_path / "logs" / "a.log", "pass")
