"""The same through the command line, every process started as a user starts it, fork server and all."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos.pool import ROOT
from tests.chaos.prepared import CHAOS
from tests.chaos.trial import Result, outcome
from tests.support.runs import processes_of, sets, wait_until

PLAN = (
    {"point": "after actor sends FilledOrder", "hit": 3, "act": "kill"},
    {"point": "before fsync */journal/000001.log", "hit": 4, "act": "kill"},
    {"point": "before rename */checkpoints/step-000003", "act": "kill_all"},
    {"point": "before write */checkpoints/.step-000004.*.tmp/optimizer.safetensors", "act": "ENOSPC"},
)
STARTS = [1, 1, 2, 0]
"""The actor's death is no end of a start."""


@pytest.mark.timeout(900)
def test_a_run_from_the_command_line_with_four_faults_ends_like_one_that_was_not(
    tmp_path: Path, undisturbed: Result
) -> None:
    run, plan = tmp_path / "run", tmp_path / "plan"
    plan.mkdir()
    (plan / "plan.json").write_text(json.dumps({"faults": PLAN}))
    codes, words = [], ["run", "embedded", "--out", str(run), *sets(CHAOS)]
    while not codes or codes[-1]:
        assert len(codes) < len(STARTS), codes
        codes.append(started(words, plan))
        wait_until(lambda: not processes_of(run, "learner") + processes_of(run, "actor"), "the end of all processes")
        words = ["resume", str(run)]
    assert codes == STARTS
    assert len(list(plan.glob("happened-*"))) == len(PLAN)
    assert comparable(outcome(run)) == comparable(undisturbed.outcome)


def started(words: list[str], plan: Path) -> int:
    command = [sys.executable, "-m", "launch", *words]
    environment = os.environ | {"TANDEM_FAILPOINTS": str(plan)}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, timeout=300).returncode


def comparable(found: dict[str, object]) -> dict[str, object]:
    """As JSON gives it back: pairs are lists there."""
    return json.loads(json.dumps(found))
