"""The end of a learner, seen at any moment: what ended with an error is never taken for a run that is done. And what is
written afterwards: it changes nothing about how the run ended."""

import errno
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import IO

import pytest

from launch.__main__ import main
from launch.commands.watch_run import watch_run
from launch.supervisor.restarts import SupervisorLimits
from launch.supervisor.supervise import Screen, Supervisor
from launch.supervisor.topology import Process, ProcessFailed, Topology
from shared.config.load import config_from_json
from shared.config.tree import Config
from shared.errors import DataError
from shared.run.run_dir import RunDir
from shared.run.summary import read_summary
from tests.support.disk_faults import failing
from tests.support.run_files import write_run

QUICK = SupervisorLimits(tick_s=0.0, leaving_s=0.0, grace_s=0.0)


class Scripted:
    """A process that runs for so many looks at it, and then has ended."""

    pid = None

    def __init__(self, looks: float, code: int) -> None:
        self.looks = looks
        self.code = code

    def exit_code(self) -> int | None:
        self.looks -= 1
        return None if self.looks >= 0 else self.code

    def send_signal(self, number: int) -> None:
        pass

    def kill_group(self) -> None:
        pass


class ScriptedStarter:
    """Its learner ends; actors serve for ever."""

    def __init__(self, looks: float, code: int) -> None:
        self.learner = Scripted(looks, code)

    def start(self, process: Process, log: IO[bytes]) -> Scripted:
        return self.learner if process.name == "learner" else Scripted(math.inf, 0)

    def close(self) -> None:
        pass


class NoScreen:
    def tick(self) -> int:
        return 0

    def note(self, text: str) -> None:
        pass

    def log_line(self, name: str, line: str) -> None:
        pass


def supervisor(folder: Path, looks: float, code: int) -> Supervisor:
    def process(name: str) -> Process:
        return Process(name=name, argv=(), environment={}, threads=1, log=folder / f"{name}.log")

    plan = Topology(run_dir=folder, endpoint="ipc", learner=process("learner"), actors=(process("actor0"),))
    return Supervisor(plan, NoScreen(), ScriptedStarter(looks, code), QUICK)


@pytest.mark.parametrize("looks", range(8))
def test_a_learner_that_fails_between_two_looks_has_failed(looks: int, tmp_path: Path) -> None:
    with pytest.raises(ProcessFailed, match="learner ended with exit code 1"):
        supervisor(tmp_path, looks, 1).run()


@pytest.mark.parametrize("looks", range(8))
def test_a_learner_that_is_done_ends_the_run(looks: int, tmp_path: Path) -> None:
    supervisor(tmp_path, looks, 0).run()


def with_tracker(folder: Path, on_term: str, steps: int = 1) -> Supervisor:
    """A run whose learner has failed after so many steps, and a real tracker that notes when it is asked to end."""
    code = f"import signal, time; signal.signal(signal.SIGTERM, lambda *_: {on_term}); print('up', flush=True)"
    log = folder / "tracker.log"
    argv = (sys.executable, "-c", f"{code}; time.sleep(60)")
    made = supervisor(folder, math.inf, 1)
    made.followers.processes["tracker"] = Process(name="tracker", argv=argv, environment={}, threads=1, log=log)
    made.limits = made.followers.limits = replace(QUICK, tick_s=0.01, grace_s=60.0)
    made.screen = EndsTheLearner(made, log, steps)
    return made


class EndsTheLearner(NoScreen):
    """Once the tracker is there."""

    def __init__(self, made: Supervisor, log: Path, steps: int) -> None:
        self.made = made
        self.log = log
        self.steps = steps

    def tick(self) -> int:
        if self.log.read_text():
            starter = self.made.starter
            assert isinstance(starter, ScriptedStarter)
            starter.learner.looks = 0
        return self.steps


def test_the_tracker_of_a_run_that_has_failed_sends_the_rest(tmp_path: Path) -> None:
    made = with_tracker(tmp_path, "(time.sleep(0.3), print('sent', flush=True), exit(0))")
    with pytest.raises(ProcessFailed, match="learner ended with exit code 1"):
        made.run()
    assert (tmp_path / "tracker.log").read_text() == "up\nsent\n"
    assert made.followers.children == {}


def test_nobody_waits_for_the_tracker_of_a_run_that_fails_before_its_first_step(tmp_path: Path) -> None:
    made = with_tracker(tmp_path, "print('asked', flush=True)", steps=0)
    with pytest.raises(ProcessFailed, match="learner ended with exit code 1"):
        made.run()
    assert (tmp_path / "tracker.log").read_text() == "up\n"


def test_ctrl_c_ends_the_wait_for_the_tracker_of_a_run_that_has_failed(tmp_path: Path) -> None:
    made = with_tracker(tmp_path, "print('deaf', flush=True)")

    def interrupt() -> None:
        while "deaf" not in (tmp_path / "tracker.log").read_text():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    (tmp_path / "tracker.log").touch()
    threading.Thread(target=interrupt, daemon=True).start()
    began = time.monotonic()
    with pytest.raises(ProcessFailed, match="learner ended with exit code 1"):
        made.run()
    assert time.monotonic() - began < 50
    assert made.followers.children["tracker"].exit_code() == -signal.SIGKILL


# --- what is written afterwards


def end_with(error: BaseException | None, folder: Path, fault: int) -> RunDir:
    """Watch a run that ends like this; the rename of the file that has this number is refused."""
    run = RunDir(folder / "run")
    assert main(["run", "--prepare", "--out", str(run.path)]) == 0
    write_run(run, status="done", rewards=[0.5] * 6, evaluated=("base", "final"))

    def supervise(plan: Topology, screen: Screen, limits: SupervisorLimits) -> None:
        if error:
            raise error

    with failing("rename", errno.ENOSPC, nth=fault):
        config = config_from_json(run.config.read_bytes())
        watch_run(run, config, verbose=False, trace=True, supervise=supervise)
    return run


@pytest.mark.parametrize("error", [ProcessFailed("the learner crashed"), KeyboardInterrupt()])
@pytest.mark.parametrize("fault", [1, 2, 3])
def test_what_cannot_be_written_afterwards_does_not_hide_how_the_run_ended(
    error: BaseException, fault: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(type(error)) as ended:
        end_with(error, tmp_path, fault)
    assert ended.value is error
    said = [line for line in capsys.readouterr().err.splitlines() if "No space left on device" in line]
    what = ["trace.json", "the verdict in summary.json", "report.html"][fault - 1]
    assert len(said) == 1 and said[0].startswith(f"warning: {what} could not be written: ")
    run = RunDir(tmp_path / "run")
    summary = read_summary(run)
    assert summary and (run.trace.is_file(), summary.why is not None, run.report.is_file()) == tuple(
        number != fault for number in (1, 2, 3)
    )


def failed_run(folder: Path, begin: Callable[[RunDir], object]) -> tuple[RunDir, str]:
    """Ends with an error of the user after `begin`; with what `why` says of it."""
    run = RunDir(folder / "run")
    with redirect_stdout(StringIO()):
        assert main(["run", "--prepare", "--out", str(run.path)]) == 0

    def supervise(plan: Topology, screen: Screen, limits: SupervisorLimits) -> None:
        begin(run)
        raise DataError("qa.jsonl has no column 'question'; set tasks.question.")

    with pytest.raises(DataError):
        watch_run(run, Config(), verbose=False, trace=False, supervise=supervise)
    with redirect_stdout(StringIO()) as said:
        assert main(["why", str(run.path)]) == 0
    return run, said.getvalue()


def running(run: RunDir, rewards: Sequence[float]) -> None:
    write_run(run, status="running", rewards=rewards, evaluated=())


@pytest.mark.parametrize("begin", [lambda run: None, lambda run: running(run, ())])
def test_a_mistake_that_ends_a_run_at_its_start_is_what_why_says(
    begin: Callable[[RunDir], object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before the learner has written a summary, or in an actor while it says that the run goes on."""
    run, said = failed_run(tmp_path, begin)
    assert said == (
        "the run failed at its start: qa.jsonl has no column 'question'; set tasks.question. Nothing was learned: put"
        " that right, then `resume` it; if its configuration is wrong, `run` again, which may have the same --out.\n"
    )
    summary = read_summary(run)
    assert summary and (summary.status, summary.steps) == ("failed", 0) and str(summary.why) == said.strip()
    capsys.readouterr()
    assert main(["run", "--prepare", "--out", str(run.path)]) == 0
    replaced, prepared = capsys.readouterr().out.splitlines()
    assert (
        replaced
        == f"{run.path} has a run that failed at its start and learned nothing; it is replaced, and so are its keys"
    )
    assert prepared.startswith(f"{run.path} is prepared") and not run.summary.exists()


def test_a_mistake_that_ends_a_run_later_is_said_with_resume(tmp_path: Path) -> None:
    def begin(run: RunDir) -> None:
        running(run, [0.5] * 3)
        (run.journal / "000001.log").write_bytes(b"groups")

    said = failed_run(tmp_path, begin)[1]
    assert said.startswith("the run failed: qa.jsonl has no column 'question'; set tasks.question (after 3 of ")
    assert said.endswith(" steps). Put that right, then go on with `resume`.\n")


def test_a_run_that_is_done_is_done_without_its_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = end_with(None, tmp_path, 3)
    assert not run.report.exists() and "reward" in capsys.readouterr().out
