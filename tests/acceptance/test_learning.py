"""The claim itself: two processes, the embedded preset as it ships, and the reward goes up."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.runs import launch, rows, sets, summary

WINDOW = 5


@pytest.mark.timeout(400)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long), pytest.param(2, marks=pytest.mark.long)])
def test_the_preset_learns(tmp_path: Path, seed: int) -> None:
    out = tmp_path / "run"
    done = launch("run", "embedded", "--out", out, "--seed", str(seed), wait_s=600)
    assert done.returncode == 0, done.stdout + done.stderr
    rewards = [row["reward/mean"] for row in rows(out)]
    means = [sum(rewards[end - WINDOW : end]) / WINDOW for end in range(WINDOW, len(rewards) + 1)]
    assert 0.35 < rewards[0] < 0.65 and max(means) >= 0.9, means
    report = summary(out)
    assert report["status"] == "done" and report["steps"] == len(rewards) == 40
    check_evaluation(report["eval"])
    check_every_step(out)
    check_screen(done.stdout, out)


def check_evaluation(reports: dict[str, Any]) -> None:
    """Held-out accuracy rises beyond its interval, both ways of decoding."""
    assert reports["base"]["n"] == reports["final"]["n"] == 256
    for way in ("greedy", "sampled"):
        assert reports["final"][way]["low"] > reports["base"][way]["high"], reports


def check_every_step(out: Path) -> None:
    """Actor and learner agree, ratios are one, and every file that other tools read is there."""
    for row in rows(out):
        if row["mismatch/p99"] is not None:
            assert row["mismatch/p99"] <= 1e-4 and abs(row["ratio/mean"] - 1) < 1e-6 and row["clip/fraction"] == 0
        assert row["mem/actor_mb"] > 0 and row["mem/learner_mb"] > 0 and row["tokens_per_s"] > 0
    rollout = json.loads((out / "rollouts.jsonl").read_text().splitlines()[0])
    sample = rollout["samples"][0]
    assert len(sample["ids"]) == len(sample["entropy"]) and sample["outcome"] in ("correct", "wrong", "unparsable")


def check_screen(text: str, out: Path) -> None:
    """Plain lines off a terminal, and what to do next at the end."""
    assert "held-out accuracy" in text and "greedy" in text and str(out) in text
    for command in ("generate", "resume", "replay"):
        assert f"launch {command}" in text


def test_the_entropy_mask_trains_on_a_fifth_of_the_tokens(tmp_path: Path) -> None:
    out = tmp_path / "run"
    overrides = {"loss.entropy_fraction": 0.2, "run.steps": 5, "eval.problems": 0}
    assert launch("run", "embedded", "--out", out, *sets(overrides)).returncode == 0
    for row in rows(out):
        # Equal entropies are taken together, and completions of a group begin alike: a little more than the fifth.
        assert 0.2 <= row["selected/fraction"] < 0.21
        if row["groups/idle"]:
            assert 0.0 < row["weight/sum"] < row["selected/fraction"], "idle groups count in the divisor alone"
        else:
            assert row["weight/sum"] == pytest.approx(row["selected/fraction"], rel=1e-4)


def test_a_users_reward_function_in_its_worker(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text(
        "def short(prompts, completions, completion_ids, level, **columns):\n"
        "    assert len(prompts) == len(completions) == len(level)\n"
        "    return [1.0 if len(ids) < 24 else 0.0 for ids in completion_ids]\n"
    )
    out = tmp_path / "run"
    overrides = {
        "verifier.kind": "callable",
        "verifier.function": f"{tmp_path}/rewards.py:short",
        "run.steps": 12,
        "eval.problems": 0,
    }
    done = launch("run", "embedded", "--out", out, *sets(overrides))
    assert done.returncode == 0, done.stdout + done.stderr
    lengths = [row["length/mean"] for row in rows(out)]
    assert sum(lengths[-3:]) < sum(lengths[:3])


def test_tcp_with_keys_between_the_processes(tmp_path: Path) -> None:
    out = tmp_path / "run"
    overrides = {"link.endpoint": "tcp://127.0.0.1:45711", "run.steps": 2, "eval.problems": 0}
    assert launch("run", "embedded", "--out", out, *sets(overrides)).returncode == 0
    assert summary(out)["status"] == "done"


@pytest.mark.long
def test_generate_and_eval_use_the_trained_adapter(tmp_path: Path) -> None:
    out = tmp_path / "run"
    overrides = {"run.steps": 4, "eval.problems": 32, "optimizer.lr": 0.01}
    assert launch("run", "embedded", "--out", out, *sets(overrides)).returncode == 0
    questions = tmp_path / "questions.txt"
    questions.write_text("\n".join(f"Tom has {n} coins. He finds 4. How many coins now?" for n in range(3, 13)))
    texts = {
        name: launch("generate", out, "--in", questions, *flags).stdout
        for name, flags in (("policy", ()), ("base", ("--base",)))
    }
    assert "####" in texts["base"] and texts["policy"] != texts["base"]
    done = launch("eval", out, "--problems", "16")
    assert done.returncode == 0 and "n = 16" in done.stdout
    again = launch("eval", out, "--problems", "32")
    final = summary(out)["eval"]["final"]["greedy"]
    assert f"{final['accuracy']:.1%}" in again.stdout
