"""A run in bf16 gives one adapter: twice, after a kill and in a replay. The processes are real ones."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SETS = (
    "run.steps=6",
    "rollout.prompts=4",
    "rollout.max_new_tokens=32",
    "tasks.levels=[1]",
    "checkpoint.every=2",
    "eval.problems=0",
    "optimizer.lr=0.003",
    "compute.dtype=bf16",
    "compute.learner_threads=1",
    "compute.actor_threads=1",
)
WAIT_S = 300


def argv(*words: str) -> list[str]:
    return [sys.executable, "-m", "launch", *words]


def run_words(folder: Path) -> list[str]:
    return argv("run", "embedded", "--out", str(folder), *(word for key in SETS for word in ("--set", key)))


def completed(words: list[str]) -> str:
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def adapter_of(folder: Path) -> str:
    return json.loads((folder / "summary.json").read_text())["adapter_sha256"]


def kill_after(folder: Path, steps: int) -> None:
    """SIGKILL to the launcher; its processes end with it."""
    process = subprocess.Popen(run_words(folder), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    metrics, end = folder / "metrics.jsonl", time.monotonic() + WAIT_S
    while not metrics.is_file() or len(metrics.read_text().splitlines()) < steps:
        assert process.poll() is None and time.monotonic() < end, "it ended before it could be killed"
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bf16") / "whole"
    completed(run_words(folder))
    return folder


@pytest.mark.long
def test_the_run_learned_something_in_bf16_and_says_so(whole: Path) -> None:
    rows = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert any(row["grad_norm"] for row in rows)
    info = json.loads((whole / "run.json").read_text())
    assert info["compute"] | {"dtype": "bf16", "learner_threads": 1, "actor_threads": 1} == info["compute"]


@pytest.mark.long
def test_twice_and_after_a_kill_and_in_a_replay_it_is_one_adapter(whole: Path, tmp_path: Path) -> None:
    completed(run_words(tmp_path / "again"))
    kill_after(tmp_path / "killed", steps=3)
    completed(argv("resume", str(tmp_path / "killed")))
    found = {adapter_of(folder) for folder in (whole, tmp_path / "again", tmp_path / "killed")}
    replayed = json.loads(completed(argv("replay", str(tmp_path / "killed"))).splitlines()[-1])
    assert found == {replayed["adapter_sha256"]} and replayed["match"]
