"""A follower that dies, cannot start or refuses to end: a note each time, and never an error."""

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from launch.__main__ import main
from launch.supervisor.followers import Followers
from launch.supervisor.restarts import SupervisorLimits
from launch.supervisor.topology import Process
from launch.tracking.follow import noted, tracking_file
from shared.run.run_dir import RunDir
from tests.support.run_files import write_run

QUICK = SupervisorLimits(tick_s=0.01, pause_s=0.01, restarts=2, followers_s=0.5)


def followers(folder: Path, argv: tuple[str, ...], notes: list[str], *, awaited: bool = False) -> Followers:
    log = folder / "tracker.log"
    process = Process(name="tracker", argv=argv, environment={}, threads=1, log=log, awaited=awaited)
    return Followers([process], QUICK, notes.append)


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code)


def check_until(made: Followers, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        made.check()
        time.sleep(0.01)


def test_one_that_always_dies_is_given_up_with_a_note(tmp_path: Path) -> None:
    notes: list[str] = []
    made = followers(tmp_path, python("print('no network.'); raise SystemExit(1)"), notes)
    made.start()
    check_until(made, lambda: not made.children)
    assert [("starting it again" in note) for note in notes] == [True, True, False]
    assert "no network. The run goes on without it" in notes[-1]


def test_a_user_error_is_not_tried_again(tmp_path: Path) -> None:
    notes: list[str] = []
    made = followers(tmp_path, python("print('error: No key.'); raise SystemExit(2)"), notes)
    made.start()
    check_until(made, lambda: not made.children)
    assert len(notes) == 1
    assert "No key. The run goes on without it" in notes[0]


def test_one_that_cannot_be_started_is_a_note(tmp_path: Path) -> None:
    notes: list[str] = []
    made = followers(tmp_path, ("/no/such/program",), notes)
    made.start()
    made.check()
    made.finish(lambda: False)
    assert len(notes) == 1
    assert "could not be started" in notes[0]


def test_one_that_does_not_end_is_killed_after_its_time(tmp_path: Path) -> None:
    notes: list[str] = []
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True)"
    made = followers(tmp_path, python(f"{code}; time.sleep(600)"), notes)
    made.start()
    check_until(made, lambda: "deaf" in (tmp_path / "tracker.log").read_text())
    made.finish(lambda: False)
    made.kill()
    assert ["was not ready" in note for note in notes] == [True]
    assert made.children["tracker"].exit_code() == -9


def test_one_that_dies_after_the_end_is_started_again_and_told(tmp_path: Path) -> None:
    notes: list[str] = []
    code = "import sys, time; print(sys.argv[1:], flush=True); time.sleep(0 if sys.argv[1:] == ['--ended'] else 600)"
    made = followers(tmp_path, python(code), notes)
    made.start()
    check_until(made, lambda: "[]" in (tmp_path / "tracker.log").read_text())
    made.finish(lambda: False)
    assert "['--ended']" in (tmp_path / "tracker.log").read_text()
    assert made.children == {} and ["starting it again" in note for note in notes] == [True]


def test_one_that_is_awaited_has_as_much_time_as_it_needs(tmp_path: Path) -> None:
    notes: list[str] = []
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True)"
    made = followers(tmp_path, python(f"{code}; time.sleep(2 * {QUICK.followers_s})"), notes, awaited=True)
    made.start()
    check_until(made, lambda: "deaf" in (tmp_path / "tracker.log").read_text())
    made.finish(lambda: False)
    assert notes == ["waiting for the last evaluations; Ctrl-C leaves them to `resume`"] and made.children == {}


def test_after_the_end_of_a_run_they_are_started_for_the_rest(tmp_path: Path) -> None:
    notes: list[str] = []
    made = followers(tmp_path, python("import sys; print(sys.argv[1:])"), notes)
    made.limits = replace(QUICK, followers_s=20.0)
    made.start_after_end()
    assert (tmp_path / "tracker.log").read_text() == "['--ended']\n"
    assert notes == [] and made.children == {}


def test_resume_of_a_run_that_is_done_starts_its_tracker(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    run = RunDir(tmp_path / "run")
    assert main(["run", "--prepare", "--out", str(run.path), "--set", "tracking.kind=tensorboard"]) == 0
    write_run(run, status="done", rewards=[0.5] * 40, evaluated=("base", "final"))
    capsys.readouterr()
    assert main(["resume", str(run.path)]) == 0
    assert capsys.readouterr().out.startswith(f"{run.path} is finished"), "no note"
    sent = noted(tracking_file(run))
    assert sent and sent.step == 40
    assert run.report.is_file()
