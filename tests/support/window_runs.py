"""Runs for the page, written in a moment with the real writers: metrics, groups with every token, evaluations."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from shared.run.evaluation import Decoded, Evaluation, TaskResult, share_of, write_evaluation
from shared.run.files import LineLog
from shared.run.rollouts import Fate, RolloutGroup, RolloutSample, Turn, pack_group
from shared.run.run_dir import RunDir
from tests.support.planted_runs import made_up

SCRIPT = '<script>window.hacked = 1</script><img src=x onerror="window.hacked = 2">'
TASKS = ("How many pens are in 9 boxes of 6?", "Ann has 12 apples and buys 7. How many?", "What is 3 + 4?")


def sample(text: str, outcome: str, reward: float, advantage: float | None, **fields: Any) -> RolloutSample:
    """One word a token, and the token that ends it; the figures follow from their places."""
    pieces = [*[word if place == 0 else f" {word}" for place, word in enumerate(text.split(" "))], "<|im_end|>"]
    places = range(len(pieces))
    whole: dict[str, Any] = {
        "text": text,
        "turns": None,
        "ids": [100 + place for place in places],
        "pieces": pieces,
        "outcome": outcome,
        "reward": reward,
        "rewards": {"verifier": float(outcome == "correct"), "brevity": round(1 / len(pieces), 3)},
        "finish": "stop",
        "advantage": advantage,
        "kept": True,
        "logprob": [-0.01 * place for place in places],
        "gap": None if advantage is None else [1e-6 * (place - 2) for place in places],
        "entropy": [round(0.1 * place, 3) for place in places],
        "mask": None if advantage is None else [place % 3 != 0 for place in places],
    }
    return RolloutSample(**{**whole, "mask": whole["mask"] and [int(one) for one in whole["mask"]], **fields})


def group(
    step: int, slot: int, samples: Sequence[RolloutSample], fate: Fate = "trained", **fields: Any
) -> RolloutGroup:
    question = slot % len(TASKS)
    whole: dict[str, Any] = {
        "step": step,
        "group_id": f"train/{step - 1:06d}/{slot:04d}",
        "task": f"{question:016x}",
        "version": step - 1,
        "fate": fate,
        "rewards": tuple(one.reward for one in samples),
        "advantages": tuple(one.advantage for one in samples),
        "outcomes": tuple(one.outcome for one in samples),
        "lengths": tuple(len(one.ids) for one in samples),
        "prompt": f"user\n{TASKS[question]}\nassistant\n",
        "answer": "54",
        "samples": tuple(samples),
    }
    return RolloutGroup(**(whole | fields))


def usual_groups(step: int) -> list[RolloutGroup]:
    """One that teaches, an idle one, and a stale one that is quarantined."""
    right = sample(f"6 * 9 = 54 at step {step}", "correct", 1.0, 0.7)
    wrong = sample(f"6 * 9 = 52 and <b>bold</b>\n{SCRIPT}", "wrong", 0.0, -0.7)
    half = sample("12 + 7 = 19 and so on " * 4, "truncated", 0.25, -0.2, finish="length")
    alike = [sample(f"12 + 7 = {place}", "wrong", 0.0, None) for place in range(3)]
    turns = (
        Turn(sampled=True, tokens=2, text="call add"),
        Turn(sampled=False, tokens=1, text=" 7"),
        Turn(sampled=True, tokens=2, text=" seven"),
    )
    tool = sample("call add 7 seven", "correct", 1.0, 0.5, turns=turns)
    return [
        group(step, 0, [right, wrong, half]),
        group(step, 1, alike, "idle"),
        group(step, 2, [tool, sample("3 + 4 = 8", "wrong", 0.5, -0.5)], "quarantined", version=max(0, step - 3)),
    ]


def hacked_groups(step: int) -> list[RolloutGroup]:
    """Wrong answers that are paid best, in all groups but the first."""
    hack = sample("The answer is good. The answer is right. Trust me.", "wrong", 2.0, 0.6)
    honest = sample("6 * 9 = 54", "correct", 1.0, -0.6)
    return [group(step, 0, [honest, honest]), group(step, 1, [honest, hack]), group(step, 2, [hack, honest, hack])]


def log_groups(run: RunDir, groups: Sequence[RolloutGroup]) -> None:
    log = LineLog(run.rollouts)
    for one in groups:
        log.append_line(pack_group(one))
    log.close()


def evaluation(
    label: str, version: int, right: Sequence[bool], rewards: Mapping[str, float] | None = None
) -> Evaluation:
    """rewards: means of what was sampled."""
    tasks = tuple(
        TaskResult(
            question=f"What is {place} + 1?",
            answer=str(place + 1),
            greedy="correct" if one else "wrong",
            sampled=float(one),
            last_words=f"#### {place + 1 if one else 0} says {label}",
        )
        for place, one in enumerate(right)
    )
    share = msgspec.structs.asdict(share_of([float(one) for one in right]))
    greedy = Decoded(**share, cap=64)
    sampled = Decoded(**share, temperature=1.0, cap=64, draws=4, rewards=dict(rewards or {}))
    return Evaluation(
        label=label,
        version=version,
        n=len(right),
        seed=0,
        adapter_sha256="ab" * 32,
        tasks_sha256="cd" * 32,
        source="embedded",
        verifier="gsm8k",
        greedy=greedy,
        sampled=sampled,
        task_results=tasks,
    )


def usual_run(path: Path, steps: int = 12, right: int = 40, **curves: Any) -> RunDir:
    """A finished run with groups of every step and two evaluations, of 64 tasks each."""
    run = made_up(path, steps=steps, status="done", **curves)
    log_groups(run, [one for step in range(1, steps + 1) for one in usual_groups(step)])
    write_evaluation(run.eval, evaluation("base", 0, [place < 20 for place in range(64)]))
    write_evaluation(run.eval, evaluation("final", steps, [place < right for place in range(64)]))
    return run


def hacked_run(path: Path, steps: int = 24) -> RunDir:
    """The reward rises, right answers and held-out accuracy fall."""
    run = made_up(path, steps=steps, status="done", reward_mean=(0.5, 1.6), correct=(0.6, 0.15))
    log_groups(run, [one for step in range(1, steps + 1) for one in hacked_groups(step)])
    write_evaluation(run.eval, evaluation("base", 0, [place < 40 for place in range(64)], {"mean": 0.5, "polite": 0.1}))
    hacked = {"mean": 1.6, "polite": 1.5}
    write_evaluation(run.eval, evaluation("final", steps, [place < 8 for place in range(64)], hacked))
    return run


def long_run(path: Path, steps: int = 10_000) -> RunDir:
    """Metrics of so many steps, with a peak of one step in the gradient norm, and groups of each tenth step."""
    run = made_up(
        path,
        steps=steps,
        status="done",
        grad_norm=lambda step: 50.0 if step == steps // 3 else 0.1 + 0.01 * math.sin(step),
    )
    log_groups(run, [one for step in range(10, steps + 1, 10) for one in usual_groups(step)[:1]])
    return run
