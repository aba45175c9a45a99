"""Held-out accuracy, sampled by the same actors and scored by the same verifier as the training groups.

Each task gets one greedy completion and `eval.samples` completions at the training temperature; with `eval.long_cap`
both again with that larger cap. Seeds depend on the run's seed and the task only, so all policies get the same draws.
Evaluation orders are not recorded: an evaluation can be repeated and does not influence training.
shared/run/evaluation.py says what each figure means.
"""

import hashlib
import json
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

import numpy as np

from learner.objective.batch import flat
from learner.objective.turns import sampled_lengths
from learner.orders.orders import build_orders
from learner.orders.plan import OrderFiller, judge_of
from learner.tasks.sources import name_of_held_out
from learner.tasks.tasks import Task, whole_question
from protocol.messages import Finish, Group, Outcome, Sampling
from shared.config.load import most_groups
from shared.config.tree import Config
from shared.run.evaluation import Decoded, Evaluation, Example, Share, TaskResult, share_of
from shared.statistics import maj_at_k, pass_at_k, sizes

READ = (Outcome.CORRECT, Outcome.WRONG)


def decoded(
    tasks: Sequence[Task],
    groups: Sequence[Group],
    sampling: Sampling,
    rewards: dict[str, float],
    meanwhile: Callable[[], None],
) -> Decoded:
    """The figures of one evaluation lane. All groups have the same number of completions. meanwhile: called often."""
    draws = len(groups[0].lengths)
    outcomes = [outcome for group in groups for outcome in group.outcomes]
    finishes = [finish for group in groups for finish in group.finishes]
    lengths = np.concatenate([sampled_lengths(group) for group in groups])
    shares = [right_share(group) for group in groups]
    whole = share_of(shares)
    return Decoded(
        correct=whole.correct,
        accuracy=whole.accuracy,
        low=whole.low,
        high=whole.high,
        n=whole.n,
        temperature=sampling.temperature,
        cap=sampling.max_new_tokens,
        draws=draws,
        format_rate=sum(outcome in READ for outcome in outcomes) / len(outcomes),
        truncation_rate=sum(finish is Finish.LENGTH for finish in finishes) / len(finishes),
        rewards=rewards,
        length_mean=float(np.mean(lengths)),
        length_median=float(np.median(lengths)),
        length_max=int(lengths.max()),
        pass_at=pass_at(groups) if draws > 1 else {},
        maj_at=maj_at(groups, meanwhile) if draws > 1 else {},
        by_level=shares_by(tasks, shares, ("level",)),
        by_subject=shares_by(tasks, shares, ("subject", "type")),
    )


def num_right(group: Group) -> int:
    return sum(outcome is Outcome.CORRECT for outcome in group.outcomes)


def right_share(group: Group) -> float:
    return num_right(group) / len(group.outcomes)


def pass_at(groups: Sequence[Group]) -> dict[int, Share]:
    """k -> the mean over tasks."""
    draws = len(groups[0].lengths)
    return {k: share_of([pass_at_k(draws, num_right(group), k) for group in groups]) for k in sizes(draws)}


def maj_at(groups: Sequence[Group], meanwhile: Callable[[], None]) -> dict[int, Share]:
    """k -> the mean over tasks; empty if the verifier reads no final answers. All correct completions vote for one
    candidate, in whatever form the final answer is written. With many draws it takes a while."""
    if any(group.votes is None for group in groups):
        return {}
    found: dict[int, list[float]] = {k: [] for k in sizes(len(groups[0].lengths))}
    for group in groups:
        counts = votes_of(group)
        for k, values in found.items():
            meanwhile()
            values.append(maj_at_k(*counts, k))
    return {k: share_of(values) for k, values in found.items()}


def votes_of(group: Group) -> tuple[int, list[int], int]:
    """For the right final answer, for each wrong one, and completions without a vote."""
    pairs = zip(group.outcomes, group.votes or (), strict=True)
    cast = Counter(vote for outcome, vote in pairs if outcome is not Outcome.CORRECT)
    return num_right(group), [count for vote, count in cast.items() if vote], cast[0]


def shares_by(tasks: Sequence[Task], shares: Sequence[float], columns: Sequence[str]) -> dict[str, Share]:
    """Column value -> share, sorted by value. Of `columns` the first one that a task has counts."""
    grouped: dict[str, list[float]] = defaultdict(list)
    for task, share in zip(tasks, shares, strict=True):
        values = [task.columns[column] for column in columns if column in task.columns]
        if values:
            grouped[values[0]].append(share)
    return {value: share_of(grouped[value]) for value in sorted(grouped)}


NUM_SHOWN = 3
LAST_CHARS = 160


class Evaluator:
    """Evaluates policy versions on the held-out tasks."""

    def __init__(
        self,
        config: Config,
        tasks: Sequence[Task],
        filler: OrderFiller,
        text: Callable[[list[int]], str],
    ) -> None:
        self.config = config
        self.judge = judge_of(config)
        self.tasks = tasks[: config.eval.problems]
        self.tasks_sha256 = digest_of_questions(self.tasks)
        self.filler = filler
        self.text = text

    def run(self, label: str, version: int, adapter_sha256: str) -> Evaluation:
        started = time.monotonic()
        rollout, evaluation = self.config.rollout, self.config.eval
        cap, long_cap = evaluation.max_new_tokens or rollout.max_new_tokens, evaluation.long_cap
        samplings = {
            "greedy": Sampling(temperature=0.0, max_new_tokens=cap),
            "sampled": Sampling(temperature=rollout.temperature, max_new_tokens=cap),
            "long_greedy": Sampling(temperature=0.0, max_new_tokens=long_cap),
            "long_sampled": Sampling(temperature=rollout.temperature, max_new_tokens=long_cap),
        }
        groups = {
            how: self.sampled(label, how, version, sampling)
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
            source=name_of_held_out(self.config.tasks),
            verifier=self.config.verifier.kind,
            **{how: self.decoded(found, samplings[how]) for how, found in groups.items()},
            examples=tuple(map(self.example, self.tasks[:NUM_SHOWN], groups["greedy"][:NUM_SHOWN])),
            task_results=tuple(map(self.task_result, self.tasks, groups["greedy"], groups["sampled"])),
            wall_s=round(time.monotonic() - started, 3),
        )

    def decoded(self, groups: list[Group], sampling: Sampling) -> Decoded:
        return decoded(self.tasks, groups, sampling, self.judge.mean_rewards(groups), self.filler.pump)

    def sampled(self, label: str, how: str, version: int, sampling: Sampling) -> list[Group]:
        """One group per task. An order has about as many completions as a training step, if a message takes them."""
        samples = self.config.eval.samples if sampling.temperature else 1
        rows = self.config.rollout.prompts * self.config.rollout.group
        most = most_groups(samples, sampling.max_new_tokens, self.config.tasks.max_prompt_tokens)
        orders = build_orders(
            self.tasks,
            seed=self.config.run.seed,
            lane=f"eval-{label}-{how}",
            step=0,
            first_slot=0,
            samples=samples,
            version=version,
            sampling=sampling,
            groups_per_order=max(1, min(rows // samples, most)),
            # The same at both caps, so that a long completion begins like the short one.
            stream=f"eval-{how.removeprefix('long_')}",
            votes=samples > 1,
        )
        self.filler.submit(orders)
        return flat(self.filler.collect([order.order_id for order in orders]))

    def example(self, task: Task, group: Group) -> Example:
        """One completion as text, for the report."""
        return Example(
            question=whole_question(task.columns),
            answer=gold_answer(task),
            completion=self.text(group.completion_ids.tolist()),
            outcome=group.outcomes[0],
        )

    def task_result(self, task: Task, greedy: Group, sampled: Group) -> TaskResult:
        return TaskResult(
            question=whole_question(task.columns),
            answer=gold_answer(task),
            greedy=greedy.outcomes[0],
            sampled=right_share(sampled),
            last_words=self.text(greedy.completion_ids.tolist())[-LAST_CHARS:],
        )


def digest_of_questions(tasks: Sequence[Task]) -> str:
    """sha256 over questions and gold answers, in order."""
    pairs = [[whole_question(task.columns), gold_answer(task)] for task in tasks]
    return hashlib.sha256(json.dumps(pairs).encode()).hexdigest()


def gold_answer(task: Task) -> str:
    """Empty if the data has none: a reward function of the user's own may need none."""
    return task.columns.get("answer", "")
