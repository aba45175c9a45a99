"""Whole runs on a card: killed processes change nothing and leave no memory behind."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.support.runs import (
    ROOT,
    SMALL,
    kill,
    launch,
    num_rows,
    processes_of,
    replayed,
    rows,
    sets,
    start,
    summary,
    wait_until,
)

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(600)]
KEYS = SMALL | {"compute.device": "cuda"}
BACK_S = 5.0
MIB = 2**20


@pytest.fixture(scope="module")
def undisturbed(card: torch.device, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "undisturbed"
    done = launch("run", "embedded", "--out", out, *sets(KEYS))
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def assert_ended_as(undisturbed: Path, out: Path) -> None:
    assert summary(out)["adapter_sha256"] == summary(undisturbed)["adapter_sha256"]
    assert [row["step"] for row in rows(out)] == list(range(1, SMALL["run.steps"] + 1))
    assert replayed(out)["match"] is True


def test_a_replay_gives_the_same_bits(undisturbed: Path) -> None:
    assert replayed(undisturbed)["adapter_sha256"] == summary(undisturbed)["adapter_sha256"]


@pytest.mark.parametrize("residency", ["release", "swap", "shared"])
def test_where_the_base_waits_changes_nothing(undisturbed: Path, tmp_path: Path, residency: str) -> None:
    done = launch("run", "embedded", "--out", tmp_path / "run", *sets(KEYS | {"compute.residency": residency}))
    assert done.returncode == 0, done.stdout + done.stderr
    assert_ended_as(undisturbed, tmp_path / "run")


def test_metrics_have_the_memory_of_the_card(undisturbed: Path) -> None:
    for row in rows(undisturbed):
        for side in ("actor", "learner"):
            allocated, reserved, driver = (row[f"mem/{side}_{kind}"] for kind in ("allocated", "reserved", "driver"))
            assert 0 < allocated <= reserved < driver


def test_a_killed_actor_is_replaced_and_changes_nothing(undisturbed: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    launcher = start("run", "embedded", "--out", out, *sets(KEYS))
    wait_until(lambda: num_rows(out) >= 2, "the second step")
    kill(processes_of(out, "actor"))
    output, _ = launcher.communicate(timeout=300)
    assert launcher.returncode == 0, output
    assert_ended_as(undisturbed, out)


def test_a_run_is_resumed_with_the_same_bits(undisturbed: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    launcher = start("run", "embedded", "--out", out, *sets(KEYS))
    wait_until(lambda: num_rows(out) >= 3, "the third step")
    kill(processes_of(out, "learner"))
    output, _ = launcher.communicate(timeout=120)
    assert launcher.returncode == 1, output
    resumed = launch("resume", out)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert_ended_as(undisturbed, out)


ACTOR = """
import json, time, torch
from actor.wiring import build_engine
from launch.presets.load import load_config
engine = build_engine(load_config("embedded", ["compute.device=cuda"]))[0]
held = torch.zeros(256 * 2**20, dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
print(json.dumps(torch.cuda.mem_get_info()[0]), flush=True)
time.sleep(600)
"""


@pytest.mark.alone
def test_the_memory_of_a_killed_actor_comes_back(card: torch.device) -> None:
    torch.zeros(1, device=card)
    before = torch.cuda.mem_get_info()[0]
    with subprocess.Popen([sys.executable, "-c", ACTOR], cwd=ROOT, stdout=subprocess.PIPE, text=True) as actor:
        assert actor.stdout is not None
        with_it = json.loads(actor.stdout.readline())
        assert before - with_it > 256 * MIB
        actor.kill()
        killed = time.monotonic()
        wait_until(lambda: torch.cuda.mem_get_info()[0] > before - 16 * MIB, "all of its memory", seconds=60)
        assert time.monotonic() - killed < BACK_S
