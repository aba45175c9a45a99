"""Held-out accuracy, sampled by the same actor and scored by the same verifier as the training groups.

Each task is answered twice: greedily, and drawn at the training temperature. Seeds come from the run's seed and the
task alone, so base and trained policy meet the same draws. The lanes are not journaled: an evaluation can be repeated
and has no effect on training.
"""

from collections.abc import Callable, Sequence
from typing import Any

from learner.orders import build_orders
from learner.sampling import OrderDesk, flat
from learner.tasks import Task
from protocol.messages import Group, Outcome, Sampling
from shared.config import Config
from shared.interval import wilson

NUM_SHOWN = 3


class Evaluation:
    """Evaluates policy versions on the held-out tasks."""

    def __init__(
        self, config: Config, tasks: Sequence[Task], desk: OrderDesk, text: Callable[[list[int]], str]
    ) -> None:
        self.config = config
        self.tasks = tasks[: config.eval.problems]
        self.desk = desk
        self.text = text

    def run(self, label: str, version: int) -> dict[str, Any]:
        """The report of one version, as eval/<label>.json holds it."""
        greedy = self.answers(label, "greedy", version, temperature=0.0)
        sampled = self.answers(label, "sampled", version, temperature=self.config.rollout.temperature)
        return {
            "label": label,
            "version": version,
            "n": len(self.tasks),
            "seed": self.config.run.seed,
            "greedy": accuracy(greedy),
            "sampled": accuracy(sampled),
            "samples": [
                self.shown(task, group) for task, group in list(zip(self.tasks, greedy, strict=True))[:NUM_SHOWN]
            ],
        }

    def answers(self, label: str, how: str, version: int, temperature: float) -> list[Group]:
        """One answer a task."""
        cap = self.config.eval.max_new_tokens or self.config.rollout.max_new_tokens
        orders = build_orders(
            self.tasks,
            seed=self.config.run.seed,
            lane=f"eval-{label}-{how}",
            step=0,
            first_slot=0,
            samples=1,
            version=version,
            sampling=Sampling(temperature=temperature, max_new_tokens=cap),
            groups_per_order=self.config.rollout.prompts * self.config.rollout.group,
            stream=f"eval-{how}",
        )
        self.desk.submit(orders)
        return flat(self.desk.collect([order.order_id for order in orders]))

    def shown(self, task: Task, group: Group) -> dict[str, str]:
        """A completion for people to read."""
        return {
            "question": task.columns["question"],
            "answer": task.columns["answer"],
            "completion": self.text(group.completion_ids.tolist()),
            "outcome": group.outcomes[0],
        }


def accuracy(groups: Sequence[Group]) -> dict[str, float]:
    """Share of correct answers with its 95 % interval."""
    correct = sum(group.outcomes[0] is Outcome.CORRECT for group in groups)
    low, high = wilson(correct, len(groups))
    return {"correct": correct, "accuracy": correct / len(groups), "low": low, "high": high}
