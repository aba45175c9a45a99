"""Groups of rollouts.jsonl, made up."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shared.run.files import LineLog
from shared.run.rollouts import RolloutGroup, RolloutSample, pack_group, task_key


def rollout_sample(text: str, reward: float = 1.0, advantage: float | None = None, **changes: Any) -> RolloutSample:
    """One token a word."""
    words = text.split(" ")
    figures: dict[str, Any] = {
        "text": text,
        "turns": None,
        "ids": [len(word) for word in words],
        "pieces": [word if place == 0 else f" {word}" for place, word in enumerate(words)],
        "outcome": "correct" if reward > 0 else "wrong",
        "reward": reward,
        "rewards": {},
        "finish": "stop",
        "advantage": advantage,
        "kept": True,
        "logprob": [-0.5] * len(words),
        "gap": [0.001] * len(words),
        "entropy": [0.25] * len(words),
        "mask": [1] * len(words),
    }
    return RolloutSample(**figures | changes)


def rollout_group(
    step: int, texts: Sequence[str], *, slot: int = 0, prompt: str = "question", rewards: Sequence[float] = ()
) -> RolloutGroup:
    """rewards: 1 for all, unless given; the advantage is what differs from their mean."""
    paid = list(rewards) or [1.0] * len(texts)
    taught = len(set(paid)) > 1
    mean = sum(paid) / len(paid)
    samples = tuple(
        rollout_sample(text, reward, reward - mean if taught else None)
        for text, reward in zip(texts, paid, strict=True)
    )
    return RolloutGroup(
        step=step,
        group_id=f"train/{step - 1:06d}/{slot:04d}",
        task=task_key(np.frombuffer(prompt.encode(), np.uint8), {}),
        version=step - 1,
        fate="trained" if taught else "idle",
        rewards=tuple(paid),
        advantages=tuple(sample.advantage for sample in samples),
        outcomes=tuple(sample.outcome for sample in samples),
        lengths=tuple(len(sample.ids) for sample in samples),
        prompt=prompt,
        answer="42",
        samples=samples,
    )


def write_groups(path: Path, groups: Sequence[RolloutGroup]) -> None:
    """As the learner does it."""
    lines = LineLog(path)
    for group in groups:
        lines.append_line(pack_group(group))
    lines.close()
