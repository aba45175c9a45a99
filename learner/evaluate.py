"""Held-out accuracy, sampled by the same actor and scored by the same verifier as the training groups.

Each task is answered greedily, and drawn `eval.samples` times at the training temperature; both again at a long cap if
`eval.long_cap` asks for it. Seeds come from the run's seed and the task alone, so all policies meet the same draws. The
lanes are not journaled: an evaluation can be repeated and has no effect on training.
"""

import hashlib
import json
from collections.abc import Callable, Sequence

from learner.decoded import CountVotes, decoded, right_share
from learner.orders import build_orders
from learner.sampling import OrderDesk, flat
from learner.tasks import Task
from protocol.messages import Group, Sampling
from shared.config.tree import Config
from shared.run.evaluation import Answered, Evaluation, Sample

NUM_SHOWN = 3
LAST_CHARS = 160


class Evaluator:
    """Evaluates policy versions on the held-out tasks."""

    def __init__(
        self,
        config: Config,
        tasks: Sequence[Task],
        desk: OrderDesk,
        text: Callable[[list[int]], str],
        count: CountVotes | None = None,
    ) -> None:
        """count: of the votes, where somebody can tell them apart; without it there is no maj@k."""
        self.config = config
        self.tasks = tasks[: config.eval.problems]
        self.tasks_sha256 = digest_of(self.tasks)
        self.desk = desk
        self.text = text
        self.count = count

    def run(self, label: str, version: int, adapter_sha256: str) -> Evaluation:
        """The report of one version."""
        rollout, evaluation = self.config.rollout, self.config.eval
        cap, long_cap = evaluation.max_new_tokens or rollout.max_new_tokens, evaluation.long_cap
        samplings = {
            "greedy": Sampling(temperature=0.0, max_new_tokens=cap),
            "sampled": Sampling(temperature=rollout.temperature, max_new_tokens=cap),
            "long_greedy": Sampling(temperature=0.0, max_new_tokens=long_cap),
            "long_sampled": Sampling(temperature=rollout.temperature, max_new_tokens=long_cap),
        }
        groups = {
            how: self.answers(label, how, version, sampling)
            for how, sampling in samplings.items()
            if sampling.max_new_tokens
        }
        return Evaluation(
            label=label,
            version=version,
            n=len(self.tasks),
            seed=self.config.run.seed,
            adapter_sha256=adapter_sha256,
            tasks_sha256=self.tasks_sha256,
            source=self.config.tasks.source,
            verifier=self.config.verifier.kind,
            **{how: decoded(self.tasks, found, samplings[how], self.count) for how, found in groups.items()},
            samples=tuple(map(self.sample, self.tasks[:NUM_SHOWN], groups["greedy"][:NUM_SHOWN])),
            answers=tuple(map(self.answered, self.tasks, groups["greedy"], groups["sampled"])),
        )

    def answers(self, label: str, how: str, version: int, sampling: Sampling) -> list[Group]:
        """One group a task. An order holds about as many rows as one of training."""
        samples = self.config.eval.samples if sampling.temperature else 1
        rows = self.config.rollout.prompts * self.config.rollout.group
        orders = build_orders(
            self.tasks,
            seed=self.config.run.seed,
            lane=f"eval-{label}-{how}",
            step=0,
            first_slot=0,
            samples=samples,
            version=version,
            sampling=sampling,
            groups_per_order=max(1, rows // samples),
            # The same at any cap, so that a long answer begins as the short one does.
            stream=f"eval-{how.removeprefix('long_')}",
        )
        self.desk.submit(orders)
        return flat(self.desk.collect([order.order_id for order in orders]))

    def sample(self, task: Task, group: Group) -> Sample:
        """A completion for people to read."""
        return Sample(
            question=task.columns["question"],
            answer=task.columns["answer"],
            completion=self.text(group.completion_ids.tolist()),
            outcome=group.outcomes[0],
        )

    def answered(self, task: Task, greedy: Group, sampled: Group) -> Answered:
        """A task in brief."""
        return Answered(
            question=task.columns["question"],
            answer=task.columns["answer"],
            greedy=greedy.outcomes[0],
            sampled=right_share(sampled),
            said=self.text(greedy.completion_ids.tolist())[-LAST_CHARS:],
        )


def digest_of(tasks: Sequence[Task]) -> str:
    """sha256 over questions and gold answers, in order."""
    pairs = [[task.columns["question"], task.columns["answer"]] for task in tasks]
    return hashlib.sha256(json.dumps(pairs).encode()).hexdigest()
