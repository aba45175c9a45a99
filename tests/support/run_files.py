"""The files that a run leaves for readers, made up: metrics rows, evaluations, a summary."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shared.run.run_dir import RunDir
from shared.statistics import wilson

COLUMNS = """
step time_s reward/mean reward/std reward/min reward/max outcome/correct outcome/wrong outcome/unparsable
outcome/truncated outcome/timeout outcome/error outcome/abstain groups/idle groups/quarantined groups/total
advantage/mean advantage/std advantage/min advantage/max entropy/mean selected/fraction ratio/mean clip/fraction
importance/mean importance/capped importance/ess stale/fraction mismatch/mean mismatch/p95 mismatch/p99 mismatch/max
loss kl grad_norm lr length/mean turns/mean truncated tokens_per_s time/rollout_s time/verify_s time/swap_s
time/update_s time/idle_s time/step_s mem/actor_mb mem/learner_mb weight/sum constraint/fraction constraint/kl
constraint/loss noise/signal noise/spread ewc/penalty teacher/kl policy/version curriculum/stage curriculum/pass_rate
curriculum/effective_tasks
"""
"""Keys of a row of metrics.jsonl, in their order. Readers of the file rely on them."""
SHA = "ab" * 32
SAMPLES = (
    ("How many pens are in 9 boxes of 6?", "6 * 9 = 52\n#### 52", "wrong"),
    ("Ann has 12 [apples] and buys 7. How many?", "12 + 7 =", "truncated"),
    ("What is 3 + 4?", "#### 7", "correct"),
    ("The fourth sample is not shown.", "#### 1", "wrong"),
)


def metrics_row(step: int, reward: float, **changes: Any) -> dict[str, Any]:
    """One line of metrics.jsonl."""
    row: dict[str, Any] = {
        "step": step,
        "time_s": 1.5 * step,
        "reward/mean": reward,
        "outcome/correct": reward,
        "outcome/wrong": 1 - reward,
        "outcome/timeout": 0.0,
        "groups/idle": 3,
        "groups/total": 16,
        "entropy/mean": 0.625,
        "mismatch/p99": 3e-6,
        "kl": None,
        "lr": 2e-3,
        "length/mean": 41.4,
        "tokens_per_s": 5321.4,
        "time/rollout_s": 1.0,
        "time/verify_s": 0.1,
        "time/update_s": 0.8,
        "time/idle_s": 0.1,
        "time/step_s": 2.0,
        "mem/actor_mb": 402.0,
        "mem/learner_mb": 1431.0,
    }
    return row | changes


def metrics_rows(rewards: Sequence[float]) -> list[dict[str, Any]]:
    """One row a step, from step 1 on."""
    return [metrics_row(step, reward) for step, reward in enumerate(rewards, start=1)]


def append_rows(metrics: Path, rows: Sequence[dict[str, Any]]) -> None:
    """As the learner does it."""
    with metrics.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def evaluation(label: str, *, greedy: int, sampled: int, n: int = 256) -> dict[str, Any]:
    """The content of eval/<label>.json."""
    examples = [
        {"question": question, "completion": f"{label} says {text}", "outcome": outcome}
        for question, text, outcome in SAMPLES
    ]
    return {
        "label": label,
        "version": 0,
        "n": n,
        "seed": 0,
        "adapter_sha256": SHA,
        "tasks_sha256": SHA,
        "source": "embedded",
        "verifier": "gsm8k",
        "greedy": share(greedy, n),
        "sampled": share(sampled, n),
        "examples": examples,
    }


def share(correct: int, n: int) -> dict[str, Any]:
    """Correct completions with their interval."""
    low, high = wilson(correct, n)
    return {"correct": correct, "accuracy": correct / n, "low": low, "high": high, "n": n}


def write_run(run: RunDir, *, status: str, rewards: Sequence[float], evaluated: Sequence[str]) -> None:
    """A run directory as it is when a run has ended this way."""
    run.eval.mkdir(parents=True, exist_ok=True)
    append_rows(run.metrics, metrics_rows(rewards))
    for label in evaluated:
        right = 128 if label == "base" else 240
        (run.eval / f"{label}.json").write_text(json.dumps(evaluation(label, greedy=right, sampled=right - 8)))
    summary = {"status": status, "steps": len(rewards), "wall_s": 61.7, "adapter_sha256": SHA, "eval": {}}
    run.summary.write_text(json.dumps(summary))
