"""One run, disturbed in every way a run can be, ends with one and the same adapter."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shared.run.failpoints import KILL, PLAN, VARIABLE
from tests.support.runs import (
    SMALL,
    dotted,
    kill,
    launch,
    num_rows,
    processes_of,
    replayed,
    rows,
    sets,
    start,
    summary,
    train,
    wait_until,
)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("runs") / "undisturbed"
    return out, train(out)


def test_the_same_config_and_seed_give_the_same_adapter(tmp_path: Path, undisturbed: tuple[Path, Any]) -> None:
    again = train(tmp_path / "again")
    assert again["adapter_sha256"] == undisturbed[1]["adapter_sha256"]
    assert again["status"] == "done" and again["steps"] == SMALL["run.steps"]


@pytest.mark.parametrize("name", ["learner", "actor0"])
def test_what_fixes_the_last_bit_is_recorded_in_the_run(undisturbed: tuple[Path, Any], name: str) -> None:
    lines = (undisturbed[0] / "logs" / f"{name}.log").read_text().splitlines()
    (said,) = [line.partition("computes with ")[2] for line in lines if "computes with " in line]
    in_force = json.loads(said)
    assert in_force["threads"] == SMALL[f"compute.{name.rstrip('0')}_threads"] and in_force["deterministic"]
    assert in_force["environment"]["MKL_CBWR"] == "AUTO,STRICT"


@pytest.mark.long
def test_another_seed_gives_another_adapter(tmp_path: Path, undisturbed: tuple[Path, Any]) -> None:
    assert train(tmp_path / "other", run__seed=1)["adapter_sha256"] != undisturbed[1]["adapter_sha256"]


def test_replay_needs_no_actor_and_matches(undisturbed: tuple[Path, dict[str, Any]]) -> None:
    out, expected = undisturbed
    report = replayed(out)
    assert report["match"] is True and report["adapter_sha256"] == expected["adapter_sha256"]


def assert_ended_as(undisturbed: tuple[Path, Any], out: Path) -> None:
    """The same adapter, every step once, and a journal that gives it again."""
    assert summary(out)["adapter_sha256"] == undisturbed[1]["adapter_sha256"]
    assert [row["step"] for row in rows(out)] == list(range(1, SMALL["run.steps"] + 1))
    assert replayed(out)["match"] is True


@pytest.mark.long
def test_an_actor_killed_in_mid_step_is_replaced_and_changes_nothing(
    tmp_path: Path, undisturbed: tuple[Path, Any]
) -> None:
    out = tmp_path / "run"
    launcher = start("run", "embedded", "--out", out, *sets(SMALL))
    wait_until(lambda: num_rows(out) >= 2, "the second step")
    kill(processes_of(out, "actor"))
    output, _ = launcher.communicate(timeout=180)
    assert launcher.returncode == 0, output
    assert_ended_as(undisturbed, out)


@pytest.mark.long
def test_a_learner_killed_in_mid_step_goes_on_where_its_journal_ends(
    tmp_path: Path, undisturbed: tuple[Path, Any]
) -> None:
    out = tmp_path / "run"
    launcher = start("run", "embedded", "--out", out, *sets(SMALL))
    wait_until(lambda: num_rows(out) >= 3, "the third step")
    kill(processes_of(out, "learner"))
    output, _ = launcher.communicate(timeout=60)
    assert launcher.returncode == 1 and "learner" in output
    wait_until(lambda: not processes_of(out, "actor"), "the end of the actor", seconds=10)
    resumed = launch("resume", out)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert_ended_as(undisturbed, out)


@pytest.mark.long
def test_a_learner_killed_between_two_updates_of_a_step_does_the_whole_step_again(
    tmp_path: Path, undisturbed: tuple[Path, Any]
) -> None:
    updates = {"batch.updates": 3}
    expected = train(tmp_path / "whole", **{"batch__updates": 3})["adapter_sha256"]
    assert expected != undisturbed[1]["adapter_sha256"]
    out, plan = tmp_path / "run", tmp_path / "plan"
    plan.mkdir()
    (plan / PLAN).write_text(json.dumps({"faults": [{"point": "after learner steps", "hit": 5, "act": KILL}]}))
    argv = [sys.executable, "-m", "launch", "run", "embedded", "--out", str(out), *sets(SMALL | updates)]
    faults = {VARIABLE: str(plan)}
    killed = subprocess.run(argv, env=os.environ | faults, capture_output=True, text=True, timeout=240, check=False)
    assert killed.returncode == 1 and num_rows(out) < SMALL["run.steps"], killed.stdout + killed.stderr
    resumed = launch("resume", out)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert summary(out)["adapter_sha256"] == expected
    assert [row["step"] for row in rows(out)] == list(range(1, SMALL["run.steps"] + 1))
    assert replayed(out)["match"] is True


def test_the_first_interrupt_finishes_the_step_and_resume_goes_on(
    tmp_path: Path, undisturbed: tuple[Path, Any]
) -> None:
    out = tmp_path / "run"
    launcher = start("run", "embedded", "--out", out, *sets(SMALL))
    wait_until(lambda: num_rows(out) >= 1, "the first step")
    launcher.send_signal(signal.SIGINT)
    output, _ = launcher.communicate(timeout=60)
    assert launcher.returncode == 0, output
    stopped = summary(out)
    assert stopped["status"] == "stopped" and stopped["steps"] == num_rows(out) < SMALL["run.steps"]
    assert "resume" in output
    assert launch("resume", out).returncode == 0
    assert summary(out)["adapter_sha256"] == undisturbed[1]["adapter_sha256"]


@pytest.mark.long
def test_a_second_interrupt_stops_at_once_and_loses_nothing(tmp_path: Path, undisturbed: tuple[Path, Any]) -> None:
    out = tmp_path / "run"
    launcher = start("run", "embedded", "--out", out, *sets(SMALL))
    wait_until(lambda: num_rows(out) >= 3, "the third step")
    os.kill(processes_of(out, "actor")[0], signal.SIGSTOP)
    launcher.send_signal(signal.SIGINT)
    wait_until(lambda: "asked to stop" in (out / "logs" / "learner.log").read_text(), "the request to stop")
    launcher.send_signal(signal.SIGINT)
    output, _ = launcher.communicate(timeout=20)
    assert launcher.returncode == 130, output
    assert not processes_of(out, "learner") and not processes_of(out, "actor")
    assert launch("resume", out).returncode == 0
    assert summary(out)["adapter_sha256"] == undisturbed[1]["adapter_sha256"]


@pytest.mark.long
def test_a_killed_launcher_leaves_no_orphan(tmp_path: Path) -> None:
    out = tmp_path / "run"
    launcher = start("run", "embedded", "--out", out, *sets(SMALL))
    wait_until(lambda: num_rows(out) >= 1, "the first step")
    launcher.kill()
    launcher.communicate()
    wait_until(lambda: not processes_of(out, "learner") + processes_of(out, "actor"), "the children's end", seconds=5)
    assert launch("resume", out).returncode == 0


@pytest.mark.long
def test_resume_trains_a_finished_run_further(tmp_path: Path, undisturbed: tuple[Path, Any]) -> None:
    out = tmp_path / "run"
    shutil.copytree(undisturbed[0], out)
    assert "finished" in launch("resume", out).stdout
    assert launch("resume", out, "--steps", "8").returncode == 0
    assert summary(out)["steps"] == 8 and [row["step"] for row in rows(out)] == list(range(1, 9))
    assert replayed(out)["match"] is True


@pytest.mark.long
@pytest.mark.parametrize("disturb", [True, False])
def test_a_lag_is_as_repeatable_as_strict_turns(tmp_path: Path, disturb: bool) -> None:
    lagging = {"pipeline__max_lag": 2, "rollout__groups_per_order": 2, "rollout__replacement_rounds": 1}
    expected = train(tmp_path / "a", **lagging)["adapter_sha256"]
    out = tmp_path / "b"
    launcher = start("run", "embedded", "--out", out, *sets(SMALL | dotted(lagging)))
    if disturb:
        wait_until(lambda: num_rows(out) >= 3, "the third step")
        kill(processes_of(out, "learner"))
        launcher.communicate(timeout=60)
        assert launch("resume", out).returncode == 0
    else:
        output, _ = launcher.communicate(timeout=180)
        assert launcher.returncode == 0, output
    assert summary(out)["adapter_sha256"] == expected
    assert [row["policy/version"] for row in rows(out)] == [0, 0, 0, 1, 2, 3]
    assert replayed(out)["match"] is True
