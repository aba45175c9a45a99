"""Runs with real trackers, read back: every metric of every step is there once, across a resume and across kills.

A tracker that is not installed is skipped with that reason; tests/run.sh installs all three.
"""

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest

from shared.config.load import config_to_json
from shared.config.processes import TrackingConfig
from shared.config.tree import Config
from shared.run.evaluation import figures, write_evaluation
from shared.run.files import LineLog
from shared.run.metrics import KEYS
from shared.run.rollouts import pack_group
from shared.run.run_dir import RunDir
from tests.support.fakes import toy_evaluation
from tests.support.rollouts import rollout_group
from tests.support.runs import ROOT, SMALL, launch, num_rows, sets, start, summary, wait_until
from tests.support.tracked import Steps, assert_equal, tensorboard_events, tracked, wandb_summary, written

KINDS = ("trackio", "wandb", "tensorboard")


@pytest.fixture(scope="module")
def trackio_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all tests: trackio reads TRACKIO_DIR once, when it is imported."""
    return tmp_path_factory.mktemp("trackio")


@pytest.fixture
def kind(request: pytest.FixtureRequest, trackio_folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A tracker that keeps everything in a folder of the tests and calls nobody."""
    kind = request.param
    if importlib.util.find_spec(kind) is None:
        pytest.skip(f"{kind} is not installed; `pip install -e '.[{kind}]'` does that")
    monkeypatch.setenv("TRACKIO_DIR", str(trackio_folder))
    monkeypatch.setenv("WANDB_MODE", "offline")
    return kind


each_kind = pytest.mark.parametrize("kind", KINDS, indirect=True)


def made_run(out: Path, kind: str, name: str = "") -> RunDir:
    """A run directory as the learner fills it, without a learner."""
    config = Config(tracking=TrackingConfig(kind=kind, name=name))  # pyright: ignore[reportArgumentType]
    return RunDir.create(out, config_to_json(config))


def add_steps(run: RunDir, steps: Iterable[int]) -> None:
    """As the learner writes them: the rollouts first."""
    rollouts, metrics = LineLog(run.rollouts), LineLog(run.metrics)
    for step in steps:
        texts = [f"answer {step}.{index}" for index in range(2)]
        rollouts.append_line(pack_group(rollout_group(step, texts, prompt=f"question {step}")))
        row = ROW | {"step": step, "time_s": step / 2, "reward/mean": step / 8, "time/step_s": 0.1 * step}
        metrics.append(row)
    rollouts.close()
    metrics.close()


ROW = {name: index / 4 for index, name in enumerate(KEYS.values())} | {"kl": None, "outcome/correct": 0.5, "loss": 0.1}


def start_tracker(run: RunDir) -> "subprocess.Popen[bytes]":
    """Returns when it handles signals."""
    argv = [sys.executable, "-m", "launch.tracking", "--run", str(run.path)]
    log = log_of(run)
    with log.open("wb") as output:
        process = subprocess.Popen(argv, cwd=ROOT, stdout=output, stderr=output, start_new_session=True)
    wait_until(lambda: "loads" in log.read_text(), "a start of the tracker", 240.0)
    return process


def log_of(run: RunDir) -> Path:
    return run.logs / "tracker.log"


def finish_tracker(run: RunDir) -> None:
    """It is asked to end before it has sent anything, and sends all then."""
    process = start_tracker(run)
    process.terminate()
    assert process.wait(240) == 0, log_of(run).read_text()


@each_kind
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_metrics_are_there_and_the_next_start_continues(kind: str, tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", kind)
    add_steps(run, (1, 2, 3))
    finish_tracker(run)
    assert_equal(tracked(kind, run.path), written(run.path))
    # A resumed run drops its last row and writes it again.
    LineLog(run.metrics).truncate_from(3)
    LineLog(run.rollouts).truncate_from(3)
    add_steps(run, (3, 4, 5))
    finish_tracker(run)
    assert len(written(run.path)) == 5
    assert_equal(tracked(kind, run.path), written(run.path))


@each_kind
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_a_killed_tracker_had_not_sent_is_sent_by_the_next(kind: str, tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", kind)
    add_steps(run, (1, 2, 3))
    process = start_tracker(run)
    with suppress(AssertionError):
        # Killed with some steps sent; where the tracker shows nothing until it is closed, after a while.
        wait_until(lambda: bool(tracked_so_far(kind, run.path)), "some steps", 20.0)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(60)
    add_steps(run, (4, 5))
    finish_tracker(run)
    assert_equal(tracked(kind, run.path), written(run.path))


@each_kind
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_evaluation_after_the_last_step_is_there_once(kind: str, tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", kind)
    add_steps(run, (1, 2, 3))
    final = toy_evaluation([True, False, True], version=3)
    write_evaluation(run.eval, final)
    finish_tracker(run)
    finish_tracker(run)
    expected = {f"eval/{name}": figure for name, figure in figures(final).items()}
    if kind == "wandb":
        summary = wandb_summary(run.path)
        assert expected.items() <= summary.items()
    else:
        found = tracked(kind, run.path)[3]
        assert {name: found.get(name) for name in expected} == pytest.approx(expected)


@pytest.mark.parametrize("kind", ["trackio", "tensorboard"], indirect=True)
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_tracker_that_has_lost_everything_gets_it_again(kind: str, tmp_path: Path, trackio_folder: Path) -> None:
    run = made_run(tmp_path / "run", kind)
    add_steps(run, (1, 2, 3))
    finish_tracker(run)
    if kind == "tensorboard":
        shutil.rmtree(run.path / "tensorboard")
    else:
        from trackio.sqlite_storage import SQLiteStorage  # pyright: ignore[reportMissingImports]

        at = json.loads((run.path / "tracking.json").read_text())
        assert SQLiteStorage.delete_run(at["project"], at["name"])
    finish_tracker(run)
    assert_equal(tracked(kind, run.path), written(run.path))


@pytest.mark.parametrize("kind", ["trackio"], indirect=True)
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_runs_of_one_name_are_both_there(kind: str, tmp_path: Path) -> None:
    for folder, steps in (("first", range(1, 4)), ("second", range(1, 3))):
        run = made_run(tmp_path / folder, kind, name="baseline")
        add_steps(run, steps)
        finish_tracker(run)
        assert_equal(tracked(kind, run.path), written(run.path))


@pytest.mark.parametrize("kind", ["tensorboard"], indirect=True)
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_events_have_the_times_of_their_steps(kind: str, tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", kind)
    began = time.time()
    for steps in ((1, 2), (3, 4)):
        add_steps(run, steps)
        finish_tracker(run)
    times = [event.wall_time for event in tensorboard_events(run.path) if event.summary.value]
    # run.json has whole seconds; add_steps has two steps a second.
    assert times == pytest.approx([began + step / 2 for step in (1, 2, 3, 4)], abs=1.5)
    assert [later - first for first, later in pairwise(times)] == pytest.approx([0.5] * 3)


@pytest.mark.parametrize("kind", ["wandb"], indirect=True)
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_without_a_login_everything_is_kept_here(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_login(tmp_path / "home", monkeypatch)
    run = made_run(tmp_path / "run", kind)
    add_steps(run, (1, 2, 3))
    finish_tracker(run)
    assert "No API key configured" in log_of(run).read_text()
    assert_equal(tracked(kind, run.path), written(run.path))


def without_login(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "NETRC"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("kind", ["wandb"], indirect=True)
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_weights_and_biases_that_is_disabled_is_said_to_take_nothing(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    run = made_run(tmp_path / "run", kind)
    add_steps(run, (1, 2, 3))
    assert start_tracker(run).wait(240) == 2
    assert "error: Weights & Biases is disabled" in log_of(run).read_text()
    monkeypatch.setenv("WANDB_MODE", "offline")
    finish_tracker(run)
    assert_equal(tracked(kind, run.path), written(run.path))


def tracked_so_far(kind: str, out: Path) -> Steps:
    """Nothing where its files are not there yet, or not whole."""
    try:
        return tracked(kind, out)
    except (AssertionError, OSError, ValueError):
        return {}


@pytest.mark.parametrize("kind", ["trackio"], indirect=True)
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_rollouts_are_traces(kind: str, tmp_path: Path) -> None:
    from trackio.sqlite_storage import SQLiteStorage  # pyright: ignore[reportMissingImports]

    run = made_run(tmp_path / "run", kind)
    add_steps(run, range(1, 14))
    finish_tracker(run)
    at = json.loads((run.path / "tracking.json").read_text())
    traces = SQLiteStorage.get_traces(at["project"], at["name"])
    found = {tuple(message["content"] for message in trace["messages"]) for trace in traces}
    assert found == {(f"question {step}", f"answer {step}.{index}") for step in (1, 11) for index in (0, 1)}, (
        "of steps of half a second every tenth one"
    )
    assert {trace["metadata"]["outcome"] for trace in traces} == {"correct"}


def tracker_pids(out: Path) -> list[int]:
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "launch.tracking" in words and str(out) in words:
            found.append(process.pid)
    return found


@pytest.mark.parametrize("kind", ["tensorboard"], indirect=True)
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.long
def test_the_tracker_is_killed_again_and_again_and_the_run_goes_on(kind: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    overrides: dict[str, Any] = SMALL | {"run.steps": 30, "checkpoint.every": 1000, "tracking.kind": kind}
    launcher = start("run", "embedded", "--out", out, *sets(overrides))
    killed: set[int] = set()
    while launcher.poll() is None:
        # Twice in mid-run; once the run is over it may finish.
        if len(killed) < 2 and num_rows(out) >= 3:
            for pid in set(tracker_pids(out)) - killed:
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
        time.sleep(0.2)
    said, _ = launcher.communicate()
    assert launcher.returncode == 0, said
    assert killed
    assert "starting it again, the run goes on" in said
    assert summary(out)["status"] == "done"
    # What the last tracker could not send in time is sent by the next start.
    launch("resume", out, "--steps", "31")
    assert_equal(tracked(kind, out), written(out))


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_tracker_that_stands_still_neither_stops_nor_slows_the_run(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    out = tmp_path / "run"
    overrides: dict[str, Any] = SMALL | {"run.steps": 12, "tracking.kind": "tensorboard"}
    launcher = start("run", "embedded", "--out", out, *sets(overrides))
    wait_until(lambda: bool(tracker_pids(out)), "a tracker")
    for pid in tracker_pids(out):
        os.kill(pid, signal.SIGSTOP)
    said, _ = launcher.communicate(timeout=600)
    assert launcher.returncode == 0, said
    assert summary(out)["steps"] == 12
    assert "was not ready" in said
    assert tracker_pids(out) == []


def test_a_tracker_that_is_not_installed_is_refused_before_the_run(tmp_path: Path) -> None:
    if importlib.util.find_spec("wandb") is not None:
        pytest.skip("wandb is installed")
    done = launch("run", "embedded", "--out", tmp_path / "run", "--set", "tracking.kind=wandb")
    assert done.returncode == 2
    assert "pip install -e '.[wandb]'" in done.stderr
    assert not (tmp_path / "run").exists()
