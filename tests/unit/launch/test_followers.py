"""A follower that dies, cannot start or refuses to end: a note each time, and never an error."""

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from launch.__main__ import main
from launch.supervisor.followers import Followers
from launch.supervisor.restarts import Restarts, SupervisorLimits
from launch.supervisor.topology import Process
from launch.tracking.follow import noted, tracking_file
from shared.run.run_dir import RunDir
from tests.support.run_files import write_run

QUICK = SupervisorLimits(tick_s=0.01, pause_s=0.01, restarts=2, followers_s=0.5)


def followers(folder: Path, argv: tuple[str, ...], notes: list[str], *, awaited: bool = False) -> Followers:
    return Followers([process(folder, "tracker", argv, awaited=awaited)], QUICK, notes.append)


def process(folder: Path, name: str, argv: tuple[str, ...], *, awaited: bool = False) -> Process:
    return Process(name=name, argv=argv, environment={}, threads=1, log=folder / f"{name}.log", awaited=awaited)


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code)


def check_until(made: Followers, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        made.check()
        time.sleep(0.01)


def test_one_that_always_dies_is_tried_until_the_run_has_ended(tmp_path: Path) -> None:
    notes: list[str] = []
    # As Weights & Biases ends without a network: its last line is a coloured prefix.
    code = "print('no\\x1b[0m network', '\\x1b[1;34mwandb\\x1b[0m: ', sep=chr(10)); raise SystemExit(1)"
    made = followers(tmp_path, python(code), notes)
    made.limits = made.restarts.limits = replace(QUICK, longest_pause_s=0.03, followers_s=20.0)
    made.start()
    check_until(made, lambda: made.restarts.deaths["tracker"] == 6)
    assert [("starting it again" in note) for note in notes] == [True, True, False], "once for all later starts"
    assert "exit code 1: no network. It is tried again" in notes[-1]
    made.finish(lambda: False)
    assert made.children == {} and "no network. The run goes on without it" in notes[-1] and len(notes) == 4


def test_one_that_is_awaited_and_always_dies_is_given_up(tmp_path: Path) -> None:
    notes: list[str] = []
    made = followers(tmp_path, python("raise SystemExit(1)"), notes, awaited=True)
    made.start()
    check_until(made, lambda: not made.children)
    assert ["starting it again" in note for note in notes] == [True, True, False]


def test_deaths_before_a_long_life_no_longer_count(tmp_path: Path) -> None:
    notes: list[str] = []
    made = followers(tmp_path, python("raise SystemExit(1)"), notes)
    made.limits = replace(QUICK, steady_s=0.0)
    made.start()
    check_until(made, lambda: len(notes) == 5)
    assert all("starting it again" in note for note in notes)


def test_a_pause_has_a_longest_one_however_often_it_died() -> None:
    restarts = Restarts(SupervisorLimits())
    restarts.deaths["tracker"] = 5000
    assert not restarts.plan("tracker", 1, now=0.0)
    assert restarts.due["tracker"] == 600.0


def test_the_tracker_is_asked_to_end_after_the_evaluator(tmp_path: Path) -> None:
    notes: list[str] = []
    code = "import signal, time; signal.signal(signal.SIGTERM, lambda *_: {}); print('up', flush=True); time.sleep(60)"
    tracker = process(tmp_path, "tracker", python(code.format("exit(0)")))
    done = f"(time.sleep(1), open({str(tmp_path / 'final')!r}, 'w'), exit(0))"
    evaluator = process(tmp_path, "evaluator", python(code.format(done)), awaited=True)
    made = Followers([tracker, evaluator], replace(QUICK, followers_s=20.0), notes.append)
    made.start()
    check_until(made, lambda: all((tmp_path / f"{name}.log").read_text() for name in made.children))
    seen: list[bool] = []

    def look() -> bool:
        seen.append("tracker" in made.asked_to_finish and not (tmp_path / "final").exists())
        return False

    made.finish(look)
    assert made.children == {} and notes == ["waiting for the last evaluations; Ctrl-C leaves them to `resume`"]
    assert seen and not any(seen)


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
    made.limits = replace(QUICK, followers_s=60.0)
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
