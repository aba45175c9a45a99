"""Runs with real trackers, read back: every metric of every step is there once, across a resume and across kills.

A tracker that is not installed is skipped with that reason; tests/run.sh installs all three.
"""

import importlib.util
import json
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from shared.config.load import config_to_json
from shared.config.processes import TrackingConfig
from shared.config.tree import Config
from shared.run.files import LineLog
from shared.run.metrics import KEYS
from shared.run.rollouts import pack_group
from shared.run.run_dir import RunDir
from tests.support.rollouts import rollout_group
from tests.support.runs import ROOT, SMALL, launch, num_rows, sets, start, summary, wait_until

Steps = dict[int, dict[str, float]]
"""Step -> name -> figure."""
FULL, FIRST, LAST = 1, 2, 4
"""Kinds of pieces in LevelDB's log format."""
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


def written(out: Path) -> Steps:
    """What metrics.jsonl has."""
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return {
        row["step"]: {name: figure for name, figure in row.items() if name != "step" and figure is not None}
        for row in rows
    }


def tracked(kind: str, out: Path) -> Steps:
    """What the tracker has."""
    found: Steps = {}
    for step, name, figure in {"trackio": of_trackio, "wandb": of_wandb, "tensorboard": of_tensorboard}[kind](out):
        found.setdefault(step, {})[name] = figure
    return found


def of_trackio(out: Path) -> Iterator[tuple[int, str, float]]:
    from trackio.sqlite_storage import SQLiteStorage  # pyright: ignore[reportMissingImports]

    at = json.loads((out / "tracking.json").read_text())
    rows = SQLiteStorage.get_logs(at["project"], at["name"])
    assert len({row["step"] for row in rows}) == len(rows), "no step twice"
    for row in rows:
        for name, figure in row.items():
            if name not in ("step", "timestamp") and not name.startswith("rollout/"):
                yield row["step"], name, figure


def of_wandb(out: Path) -> Iterator[tuple[int, str, float]]:
    from wandb.proto import wandb_internal_pb2  # pyright: ignore[reportMissingImports]

    ids = set()
    for file in sorted((out / "wandb").glob("offline-run-*/*.wandb")):
        for data in log_records(file.read_bytes()):
            record: Any = wandb_internal_pb2.Record()  # pyright: ignore[reportAttributeAccessIssue]
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "run":
                ids.add(record.run.run_id)
            for item in record.history.item:
                name = item.key or "/".join(item.nested_key)
                if not name.startswith("_"):
                    yield record.history.step.num, name, json.loads(item.value_json)
    assert len(ids) == 1, "a resumed run is the same tracked run"


def log_records(data: bytes) -> Iterator[bytes]:
    """Of a .wandb file: LevelDB's log format after seven bytes. A record that a kill has torn ends the file."""
    block, place, parts = 32_768, 7, b""
    while place + 7 <= len(data):
        if block - place % block < 7:
            place += block - place % block
            continue
        _, size, kind = struct.unpack_from("<IHB", data, place)
        piece = data[place + 7 : place + 7 + size]
        if kind == 0 or len(piece) < size:
            return
        parts = piece if kind in (FULL, FIRST) else parts + piece
        place += 7 + size
        if kind in (FULL, LAST):
            yield parts


def of_tensorboard(out: Path) -> Iterator[tuple[int, str, float]]:
    from tensorboard.backend.event_processing.event_file_loader import (  # pyright: ignore[reportMissingImports]
        EventFileLoader,
    )

    seen: set[tuple[int, str]] = set()
    for file in sorted((out / "tensorboard").glob("events.*")):
        for event in EventFileLoader(str(file)).Load():
            for value in event.summary.value:
                assert (event.step, value.tag) not in seen, "no step twice"
                seen.add((event.step, value.tag))
                yield event.step, value.tag, value.tensor.float_val[0]


def assert_equal(found: Steps, expected: Steps) -> None:
    assert found.keys() == expected.keys()
    for step, figures in expected.items():
        # TensorBoard keeps 32 bits of a figure.
        assert found[step] == pytest.approx(figures, rel=1e-6), f"step {step}"


def made_run(out: Path, kind: str) -> RunDir:
    """A run directory as the learner fills it, without a learner."""
    config = Config(tracking=TrackingConfig(kind=kind))  # pyright: ignore[reportArgumentType]
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
