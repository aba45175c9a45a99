"""Through real processes: rewards written for TRL, their sum, and what they log."""

import json
from pathlib import Path

import pytest

from tests.support import public_rewards
from tests.support.runs import SMALL, launch, rows, sets, summary

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

FILE = Path(public_rewards.__file__)
CONFIG = f"""
[verifier]
kind = "callable"

[verifier.rewards]
"{FILE}:accuracy_reward" = 2.0
"{FILE}:scheduled_brevity" = 0.5
"{FILE}:async_reward_func" = 1.0
"""


def test_functions_with_weights_train_and_their_logs_are_kept(run_path: Path, tmp_path: Path) -> None:
    (tmp_path / "trl.toml").write_text(CONFIG)
    done = launch("run", tmp_path / "trl.toml", "--out", run_path, *sets(SMALL))
    assert done.returncode == 0, done.stdout + done.stderr
    chosen = "reward functions get prompts and completions as lists of messages (verifier.form = 'auto'"
    summed = "a completion counts as correct if the weighted sum of its rewards is at least 0.5"
    for said in (chosen, summed):
        assert said in done.stdout and said in (run_path / "logs/actor0.log").read_text()
    seen = rows(run_path)
    steps = len(seen)
    for row in seen:
        # The embedded solutions all end in `####`, so every completion has a gold answer.
        assert row["logged/accuracy"] == pytest.approx(row["reward/accuracy_reward"])
        parts = 2.0 * row["reward/accuracy_reward"] + 0.5 * row["reward/scheduled_brevity"]
        assert row["reward/mean"] == pytest.approx(parts + row["reward/async_reward_func"])
        progress = (row["step"] - 1) / steps
        assert row["reward/scheduled_brevity"] == pytest.approx(-progress * row["length/mean"] / 100)
    groups = [json.loads(line) for line in (run_path / "rollouts.jsonl").read_text().splitlines()]
    samples = [sample for group in groups for sample in group["samples"]]
    assert all(sample["extras"]["gold_parsed"] in sample["extras"]["solution"] for sample in samples)
    assert launch("replay", run_path).returncode == 0
    assert summary(run_path)["status"] == "done"
