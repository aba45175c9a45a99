"""A reward function that does everything wrong, in a real run: the run goes on, and what happened is in the metrics."""

import json
from pathlib import Path

import psutil

from tests.support.runs import launch, rows, sets

HOSTILE = """
import math, os, sys, time

def hostile(completions, completion_ids, **columns):
    return [act(sum(ids) % 16, text) for ids, text in zip(completion_ids, completions)]

def act(what, text):
    if what == 0:
        os._exit(1)
    if what == 1:
        raise ValueError(text)
    if what == 2:
        return math.nan
    if what == 3:
        return None
    if what == 4:
        sys.exit(3)
    if what == 5:
        os.fork() or time.sleep(600)
    if what == 6:
        print("x" * 100_000)
    return 1.0 if len(text) % 2 else 0.0
"""


def test_a_run_outlives_a_hostile_reward_function(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text(HOSTILE)
    overrides = {
        "verifier.kind": "callable",
        "verifier.form": "text",
        "verifier.function": f"{tmp_path}/rewards.py:hostile",
        "verifier.on_error": "drop",
        "verifier.workers": 2,
        "rollout.prompts": 4,
        "run.steps": 2,
        "eval.problems": 0,
    }
    out = tmp_path / "run"
    done = launch("run", "embedded", "--out", out, *sets(overrides))
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((out / "summary.json").read_text())["status"] == "done"
    seen = rows(out)
    assert len(seen) == 2
    assert all(row["outcome/error"] > 0 and row["outcome/correct"] > 0 and row["outcome/wrong"] > 0 for row in seen)
    left = [process for process in psutil.process_iter(["cmdline"]) if str(tmp_path) in str(process.info["cmdline"])]
    assert left == []
