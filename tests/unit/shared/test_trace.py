"""A trace can be opened at any moment, survives kills, and has one track for each start of a process."""

import json
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from actor.rollout import Rollout
from shared.process.lease import Lease
from shared.process.trace import NO_TRACE, TraceFile, join_traces, open_trace
from shared.run.run_dir import RunDir
from tests.support.fakes import ScriptedEngine, ScriptedScorer, spelled, toy_orders, toy_policy

KILLED = """
import os, signal, sys
from pathlib import Path
from shared.process.trace import TraceFile
trace = TraceFile(Path(sys.argv[1]), "actor0")
with trace.phase("turn"):
    with trace.phase("install"):
        pass
    with trace.phase("decode"):
        os.kill(os.getpid(), signal.SIGKILL)
"""


def read(file: Path) -> list[dict[str, Any]]:
    """As viewers do: the last bracket may be missing."""
    return json.loads(file.read_text().rstrip().rstrip(",") + "]")


def whole(run: RunDir) -> list[dict[str, Any]]:
    """trace.json must be right as it is."""
    return json.loads(join_traces(run).read_text())["traceEvents"]


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path)
    run.logs.mkdir()
    return run


def test_phases_begin_and_end_in_each_other(run: RunDir) -> None:
    trace = TraceFile(run.trace_of("learner"), "learner")
    with trace.phase("turn"), trace.phase("update"):
        pass
    named, *events = read(run.trace_of("learner"))
    assert (named["ph"], named["name"], named["args"]) == ("M", "process_name", {"name": "learner"})
    found = [(event["ph"], event["name"]) for event in events]
    assert found == [("B", "turn"), ("B", "update"), ("E", "update"), ("E", "turn")]
    times = [event["ts"] for event in events]
    assert times == sorted(times) and times[0] > 1e15, "microseconds since 1970"
    assert {(event["pid"], event["tid"]) for event in events} == {(named["pid"], named["pid"])}


def test_each_start_has_a_track_of_its_own_even_with_the_same_process_id(run: RunDir) -> None:
    for name in ("learner", "actor0", "actor0"):
        TraceFile(run.trace_of(name), name)
    assert len({event["pid"] for event in whole(run)}) == 3


def test_a_phase_ends_where_it_fails(run: RunDir) -> None:
    trace = TraceFile(run.trace_of("learner"), "learner")
    with pytest.raises(KeyError), trace.phase("update"):
        raise KeyError
    assert [event["ph"] for event in read(run.trace_of("learner"))] == ["M", "B", "E"]


def test_what_was_noted_survives_a_kill_and_another_start_goes_on_behind_it(run: RunDir) -> None:
    argv = [sys.executable, "-c", KILLED, str(run.trace_of("actor0"))]
    for starts in (1, 2):
        assert subprocess.run(argv, check=False).returncode == -signal.SIGKILL
        events = read(run.trace_of("actor0"))
        assert Counter(event["name"] for event in events if event["ph"] == "B") == {
            "turn": starts,
            "install": starts,
            "decode": starts,
        }
        assert len({event["pid"] for event in events}) == starts
    assert [event["name"] for event in events if event["ph"] == "E"] == ["install"] * 2


def test_a_torn_end_costs_one_line(run: RunDir) -> None:
    trace = TraceFile(run.trace_of("actor0"), "actor0")
    with trace.phase("install"):
        pass
    with run.trace_of("actor0").open("ab") as file:
        file.write(b'{"ph": "B", "na')
    assert [event["ph"] for event in whole(run)] == ["M", "B", "E"]
    TraceFile(run.trace_of("actor0"), "actor0")
    assert [event["ph"] for event in read(run.trace_of("actor0"))] == ["M", "B", "E", "M"]


def test_all_processes_are_in_one_file_in_the_order_of_time(run: RunDir) -> None:
    traces = [TraceFile(run.trace_of(name), name) for name in ("learner", "actor0")]
    for _ in range(3):
        for trace in traces:
            with trace.phase("turn"):
                pass
    events = whole(run)
    assert [event["args"]["name"] for event in events if event["ph"] == "M"] == ["learner", "actor0"]
    times = [event["ts"] for event in events]
    assert len(events) == 14 and times == sorted(times)
    with traces[0].phase("turn"):
        pass
    assert len(whole(run)) == 16, "joined again after more of the run"


def test_without_a_trace_nothing_is_written(run: RunDir) -> None:
    for trace in (open_trace(run.path, "learner", wanted=False), open_trace(None, "actor0", wanted=True)):
        assert trace is NO_TRACE
        with trace.phase("turn"):
            pass
    assert list(run.logs.iterdir()) == [] and whole(run) == []
    assert isinstance(open_trace(run.path, "learner", wanted=True), TraceFile)


def test_an_order_has_its_phases(run: RunDir) -> None:
    trace = TraceFile(run.trace_of("actor0"), "actor0")
    (order,) = toy_orders()
    lease = Lease(run.path / "lease", trace=trace)
    rollout = Rollout(ScriptedEngine(), ScriptedScorer(), lease, spelled, trace=trace)
    rollout.fill(order, toy_policy(0), lambda phase: None)
    begun = [event["name"] for event in read(run.trace_of("actor0")) if event["ph"] == "B"]
    assert begun == ["waiting", "turn", "install", "decode", "score"]
    ended = [event["name"] for event in read(run.trace_of("actor0")) if event["ph"] == "E"]
    assert ended == ["waiting", "install", "decode", "turn", "score"], "scoring needs no lease"
