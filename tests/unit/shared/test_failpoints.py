"""A plan's faults act once, at the passing they name; without a plan nothing happens and nothing is written."""

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from shared.run.failpoints import FAILPOINTS, Failpoints, reach

APPENDER = """
import sys
from collections.abc import Mapping
from pathlib import Path
from shared.run.files import AppendFile
file = AppendFile(Path(sys.argv[1]))
for number in range(4):
    file.append(b"%d234567." % number)
    file.sync()
    print("synced", number, flush=True)
"""


def planned(folder: Path, *faults: Mapping[str, object], trace: bool = False) -> Failpoints:
    (folder / "plan.json").write_text(json.dumps({"faults": faults, "trace": trace}))
    return Failpoints.planned({"TANDEM_FAILPOINTS": str(folder)})


def append(folder: Path, file: Path) -> subprocess.CompletedProcess[str]:
    """A process that passes the points of a growing file."""
    environment = os.environ | {"TANDEM_FAILPOINTS": str(folder)}
    command = [sys.executable, "-c", APPENDER, str(file)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)


def test_without_a_plan_nothing_is_armed() -> None:
    assert not FAILPOINTS.armed
    assert reach("before write", Path("x")) == ""
    assert not Failpoints.planned({}).armed


def test_a_fault_acts_at_its_passing_and_once_a_run(tmp_path: Path) -> None:
    fault = {"point": "before fsync *.log", "hit": 2, "act": "ENOSPC"}
    first = planned(tmp_path, fault)
    for point in ("before fsync a.log", "before fsync a.json", "after fsync a.log"):
        assert first.passed(point) == ""
    with pytest.raises(OSError) as caught:
        first.passed("before fsync b.log")
    assert caught.value.errno == errno.ENOSPC
    second = planned(tmp_path, fault)
    assert [second.passed("before fsync b.log") for _ in range(3)] == ["", "", ""]


def test_two_equal_faults_act_in_two_starts(tmp_path: Path) -> None:
    fault = {"point": "x", "act": "EIO"}
    for _ in range(2):
        with pytest.raises(OSError):
            planned(tmp_path, fault, fault).passed("x")
    assert planned(tmp_path, fault, fault).passed("x") == ""


def test_a_trace_lists_what_is_passed(tmp_path: Path) -> None:
    points = planned(tmp_path, trace=True)
    for point in ("before a", "after a"):
        points.passed(point)
    assert (tmp_path / "passed").read_text() == "before a\nafter a\n"


@pytest.mark.parametrize(
    ("point", "act", "left", "acked"),
    [
        ("before write", "kill", 16, 2),
        ("after write", "kill", 24, 2),
        ("after fsync", "kill", 24, 2),
        ("before write", "tear", 16 + 4, 2),
        ("before write", "short", 16, 2),
        ("before fsync", "EIO", 24, 2),
    ],
)
def test_a_process_dies_or_fails_where_it_was_told_to(
    tmp_path: Path, point: str, act: str, left: int, acked: int
) -> None:
    hit = 3
    planned(tmp_path, {"point": f"{point} {tmp_path}/file", "hit": hit, "act": act})
    done = append(tmp_path, tmp_path / "file")
    assert (tmp_path / "file").stat().st_size == left
    assert len(done.stdout.splitlines()) == acked
    assert done.returncode == (-signal.SIGKILL if act in ("kill", "tear") else 1)
    assert append(tmp_path, tmp_path / "file").returncode == 0, "the next start is spared"


def test_kill_all_takes_the_parent_along(tmp_path: Path) -> None:
    planned(tmp_path, {"point": "before write *", "act": "kill_all"})
    parent = "import subprocess, sys; subprocess.run([sys.executable, *sys.argv[1:]])"
    command = [sys.executable, "-c", parent, "-c", APPENDER, str(tmp_path / "file")]
    environment = os.environ | {"TANDEM_FAILPOINTS": str(tmp_path)}
    assert subprocess.run(command, env=environment, timeout=60).returncode == -signal.SIGKILL
    assert (tmp_path / "file").read_bytes() == b""
