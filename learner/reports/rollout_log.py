"""Writes the groups of each step to rollouts.jsonl (shared/run/rollouts.py), as many as the configuration allows.

    a group is written if    it is one of the first log.rollouts_per_step of its step, and
                             bytes of the file with it <= (steps until now) * log.rollouts_kb

So the file is bounded, a long run has groups of all its steps, and what short steps leave over is there for long ones.
A run that was resumed writes the same rows again, because the rule knows nothing but the file.
Left out on purpose: choosing groups by what they show. The first ones of a step are a fair sample of it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import numpy as np

from learner.objective.batch import StepBatch, TrainSample
from learner.objective.judged import Collected, JudgedGroup
from learner.objective.turns import pieces, sampled_lengths, trained_tokens
from learner.tasks.tasks import Task
from learner.update.figures import StepResult
from protocol.messages import Group
from shared.config.processes import LogConfig
from shared.run.files import LineLog
from shared.run.rollout_index import RolloutIndex
from shared.run.rollouts import Fate, RolloutGroup, RolloutSample, Turn, Values, pack_group, task_key

DIGITS, GAP_DIGITS = 4, 6
"""After the point. Of two fp32 log-probs the difference is rounding, a few millionths."""


@dataclass(frozen=True, kw_only=True)
class Words:
    """How tokens are shown."""

    text: Callable[[list[int]], str]
    """Without special tokens."""
    spelled: Callable[[list[int]], str]
    """With them."""
    known: dict[int, str] = field(default_factory=dict[int, str])
    """Pieces that were spelled before."""

    def piece(self, token: int) -> str:
        """Its text between others. Decoders of some models drop a space at the beginning, hence the second of two."""
        if token not in self.known:
            self.known[token] = self.spelled([token, token])[len(self.spelled([token])) :]
        return self.known[token]


@dataclass(frozen=True, kw_only=True)
class StepFacts:
    """What a step knows of its samples, by their names."""

    versions: Mapping[str, int]
    """Policy that sampled a group, by its id."""
    samples: Mapping[str, TrainSample]
    """Those that the update used."""
    taught: frozenset[str]
    """Names of those with an advantage."""
    learner: Mapping[str, np.ndarray]
    """[used tokens] log pi before the update."""
    quarantined: bool
    """Whether the update was refused."""


class RolloutLog:
    """rollouts.jsonl of a run."""

    def __init__(self, lines: LineLog, limits: LogConfig, words: Words, *, sampled: bool = True) -> None:
        """sampled: whether an actor wrote the completions. Those of a warm start have no log-prob of an actor."""
        self.lines = lines
        self.limits = limits
        self.words = words
        self.sampled = sampled

    def log(self, step: int, collected: Collected, batch: StepBatch, result: StepResult) -> None:
        """step: from 0."""
        facts = StepFacts(
            versions={group.group_id: order.policy_version for order in collected.filled for group in order.groups},
            samples={one.sample.name: one for one in batch.used},
            taught=frozenset(one.sample.name for one in batch.samples),
            learner=result.stats.logprobs if result.stats else {},
            quarantined=result.quarantined > 0,
        )
        room = (step + 1) * self.limits.rollouts_bytes
        most = self.limits.rollouts_per_step
        for judged, task in zip(collected.groups[:most], collected.tasks[:most], strict=True):
            line = pack_group(self.group(step + 1, judged, task, facts))
            if self.lines.size + len(line) <= room:
                self.lines.append_line(line)

    def resume_at(self, step: int) -> None:
        """Keep the rows before `step`. The log may have gigabytes, so no row is decoded, and nothing is written again
        where there is nothing to drop."""
        end = RolloutIndex(self.lines.path).end_before(step)
        if end < self.lines.size:
            self.lines.cut_to(end)

    def group(self, step: int, judged: JudgedGroup, task: Task, facts: StepFacts) -> RolloutGroup:
        group = judged.group
        samples = tuple(self.samples(judged, facts))
        return RolloutGroup(
            step=step,
            group_id=group.group_id,
            task=task_key(task.prompt_ids, task.columns),
            version=facts.versions[group.group_id],
            fate=fate(judged, facts),
            rewards=tuple(sample.reward for sample in samples),
            advantages=tuple(sample.advantage for sample in samples),
            outcomes=tuple(sample.outcome for sample in samples),
            lengths=tuple(sampled_lengths(group).tolist()),
            prompt=self.words.text(group.prompt_ids.tolist()),
            answer=task.columns.get("answer", ""),
            samples=samples,
        )

    def samples(self, judged: JudgedGroup, facts: StepFacts) -> Iterable[RolloutSample]:
        group = judged.group
        figures = figures_of(group)
        for index, (tokens, trained, logprob, entropy) in enumerate(figures):
            name = f"{group.group_id}[{index}]"
            used = facts.samples.get(name)
            taught = used if name in facts.taught else None
            learner = facts.learner.get(name)
            yield RolloutSample(
                text=self.words.text(tokens),
                turns=None if group.trained is None else self.turns(tokens, trained),
                ids=tokens,
                pieces=[self.words.piece(token) for token in tokens],
                outcome=group.outcomes[index],
                reward=float(judged.rewards[index]),
                rewards={part: float(values[index]) for part, values in judged.parts.items()},
                extras=extras(group, index),
                finish=group.finishes[index],
                advantage=round(taught.sample.advantage, GAP_DIGITS) if taught else None,
                kept=bool(judged.kept[index]),
                logprob=logprob if self.sampled else [None] * len(tokens),
                gap=gap(used, learner) if self.sampled else None,
                written=None if self.sampled else written(used, learner),
                entropy=entropy,
                mask=taught.selected.astype(int).tolist() if taught else None,
            )

    def turns(self, ids: list[int], trained: np.ndarray) -> tuple[Turn, ...]:
        return tuple(
            Turn(sampled=sampled, tokens=part.stop - part.start, text=self.words.text(ids[part]))
            for sampled, part in pieces(trained)
        )


def fate(judged: JudgedGroup, facts: StepFacts) -> Fate:
    if facts.quarantined:
        return "quarantined"
    return "trained" if judged.teaches else "idle"


def extras(group: Group, index: int) -> dict[str, str]:
    """What rewards wrote about one completion."""
    return {name: texts[index] for name, texts in group.extras.items()}


def figures_of(group: Group) -> Iterator[tuple[list[int], np.ndarray, Values, Values | None]]:
    """Ids, mask of sampled tokens, log-probs and entropies of each completion; rounded at once, since calls cost."""
    ids, trained = group.completion_ids.tolist(), trained_tokens(group)
    logprobs = rounded(group.logprobs, DIGITS)
    entropies = None if group.entropies is None else rounded(group.entropies, DIGITS)
    for first, last in pairwise([0, *accumulate(group.lengths)]):
        part = slice(first, last)
        yield ids[part], trained[part], logprobs[part], None if entropies is None else entropies[part]


def gap(used: TrainSample | None, learner: np.ndarray | None) -> Values | None:
    """[T] log pi - log mu; null where the learner had no need of it."""
    if used is None or learner is None:
        return None
    return rounded(at_used(used, learner - used.sample.actor_logprobs[used.used]), GAP_DIGITS)


def written(used: TrainSample | None, learner: np.ndarray | None) -> Values | None:
    """[T] log pi of an answer that no actor wrote; null where the learner had no need of it."""
    return None if used is None or learner is None else rounded(at_used(used, learner), DIGITS)


def at_used(used: TrainSample, values: np.ndarray) -> np.ndarray:
    """[used tokens] -> [T], NaN for the other tokens."""
    found = np.full(len(used.used), np.nan)
    found[used.used] = values
    return found


def rounded(values: np.ndarray, digits: int) -> Values:
    """What is not finite becomes null in JSON."""
    return np.round(values.astype(np.float64), digits).tolist()
