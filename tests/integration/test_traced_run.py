"""`--trace`: a run that failed and went on leaves the phases of all its processes."""

import json
import os
from collections import defaultdict
from pathlib import Path

import pytest

from tests.support.runs import SMALL, kill, launch, num_rows, processes_of, sets, start, wait_until

CORES = len(os.sched_getaffinity(0))
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def phases(out: Path) -> dict[str, list[tuple[int, list[str]]]]:
    """Name of a process -> each of its starts, with the phases that it began."""
    begun: dict[int, list[str]] = defaultdict(list)
    names: dict[int, str] = {}
    for event in json.loads((out / "trace.json").read_text())["traceEvents"]:
        if event["ph"] == "M":
            names[event["pid"]] = event["args"]["name"]
        elif event["ph"] == "B":
            begun[event["pid"]].append(event["name"])
    found: dict[str, list[tuple[int, list[str]]]] = defaultdict(list)
    for pid, name in names.items():
        found[name].append((pid, begun[pid]))
    return found


@pytest.mark.long
def test_every_start_of_every_process_has_its_phases(tmp_path: Path) -> None:
    out = tmp_path / "run"
    # A thread more than there are cores, so that the processes need the lease.
    config = SMALL | {"eval.problems": 4, "compute.learner_threads": CORES, "checkpoint.every": 1, "run.steps": 4}
    run = start("run", "embedded", "--out", out, "--trace", *sets(config))
    wait_until(lambda: num_rows(out) >= 2, "two steps")
    assert json.loads((out / "logs" / "trace-learner.json").read_text().rstrip(",\n") + "]"), "while it runs"
    kill(processes_of(out, "learner"))
    said, _ = run.communicate(timeout=120)
    assert run.returncode == 1 and f"{out / 'trace.json'} shows" in said, said
    failed = phases(out)
    assert {name: len(starts) for name, starts in failed.items()} == {"learner": 1, "actor0": 1}
    done = launch("resume", out, "--trace")
    assert done.returncode == 0, done.stdout + done.stderr
    found = phases(out)
    assert {name: len(starts) for name, starts in found.items()} == {"learner": 2, "actor0": 2}
    (_, first), (_, second) = found["learner"]
    assert first[:1] == ["load"] and {"evaluation base", "waiting", "turn", "update", "passes", "publish"} <= {*first}
    assert {"load", "waiting", "turn", "update", "checkpoint", "evaluation final"} <= {*second}
    for _, actor in found["actor0"]:
        assert {"waiting", "turn", "load", "install", "decode", "score"} == {*actor}
