"""Fills one order: decode while holding the lease, release it, score. Completions that end early are scored meanwhile.

Completion text exists only here, for the verifier; the learner gets token ids and numbers.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from statistics import fmean
from typing import Protocol

import numpy as np
from msgspec import structs

from actor.engines.engine import Completion, EndedCompletion, Engine
from actor.environments.episodes import Episode, Player
from actor.installer import EXACT, Allowed, Installer
from actor.scoring.scores import Scorer, Scores
from actor.scoring.teacher import AskTeacher, no_teacher
from actor.scoring.votes import CastVotes, nobody_votes
from actor.verifiers.reward_arguments import MAX_EXTRA_CHARS
from actor.verifiers.verdict import Context, ScoreJob, Verdict
from protocol.codec import body_bytes
from protocol.limits import GROUPS_BYTES, MAX_KEYS
from protocol.messages import FilledOrder, Finish, Group, GroupOrder, Order, Policy, Timings
from shared.process.free_memory import peak_memory_mb
from shared.process.lease import ComputeLease
from shared.process.trace import NO_TRACE, Trace

Beat = Callable[[str], None]
NO_CONTEXT = Context()


class Installs(Protocol):
    """Sees to it that what is sampled next comes from this policy."""

    def install(self, policy: Policy, *, woken: bool) -> None: ...


class Rollout:
    """Fills orders with one engine and one scorer."""

    def __init__(
        self,
        engine: Engine,
        scorer: Scorer,
        lease: ComputeLease,
        text: Callable[[list[int]], str],
        canary: Allowed = EXACT,
        trace: Trace = NO_TRACE,
        context: Context = NO_CONTEXT,
        episodes: Player | None = None,
        votes: CastVotes = nobody_votes,
        teacher: AskTeacher = no_teacher,
        installer: Installs | None = None,
    ) -> None:
        """episodes: of a run with an environment or an agent. votes, teacher: for orders that ask for them. installer:
        of an engine that verifies by itself whatever it installs."""
        self.episodes = episodes
        self.votes = votes
        self.teacher = teacher
        self.engine = engine
        self.installer: Installs = installer or Installer(engine, canary)
        self.scorer = scorer
        self.lease = lease
        self.text = text
        self.trace = trace
        self.context = context

    def fill(self, order: Order, policy: Policy, beat: Beat) -> FilledOrder:
        """Sample with exactly the policy version that the order names, then score."""
        with self.lease.hold("actor", lambda: beat("waiting for its turn")) as turn:
            start = time.monotonic()
            with self.trace.phase("install"):
                self.installer.install(policy, woken=self.engine.wake())
            installed = time.monotonic()
            with self.trace.phase("decode"):
                sampled = self.sample(order, beat)
            decoded = time.monotonic()
            self.engine.sleep()
            slept = time.monotonic()
        with self.trace.phase("score"):
            groups = sampled()
        if order.teacher:
            with self.trace.phase("teacher"):
                groups = self.teacher(groups, beat)
        card = turn.peak.mib()
        timings = Timings(
            wait_s=turn.waited_s,
            swap_s=installed - start + slept - decoded,
            rollout_s=decoded - installed,
            verify_s=time.monotonic() - slept,
            memory_mb=peak_memory_mb(),
            card_allocated_mb=card["allocated"],
            card_reserved_mb=card["reserved"],
            card_driver_mb=card["driver"],
        )
        return FilledOrder(
            order_id=order.order_id,
            policy_version=policy.version,
            adapter_sha256=policy.sha256,
            groups=groups,
            timings=timings,
        )

    def sample(self, order: Order, beat: Beat) -> Callable[[], tuple[Group, ...]]:
        """Decode; what is returned waits for the scores."""
        context = structs.replace(self.context, global_step=order.policy_version)
        votes = self.votes if order.votes else nobody_votes
        scoring = OrderScoring(order.groups, self.scorer.begin(), self.text, beat, context, votes)
        if self.episodes is None:
            completions = self.engine.generate(order.groups, order.sampling, scoring.on_ended)
            return lambda: scoring.groups(completions)
        played = self.episodes.play(order, self.engine, beat)
        return lambda: scoring.played(played)


class OrderScoring:
    """Scores the completions of one order: each goes to the verifier as soon as it has ended."""

    def __init__(
        self,
        orders: tuple[GroupOrder, ...],
        scores: Scores,
        text: Callable[[list[int]], str],
        beat: Beat,
        context: Context = NO_CONTEXT,
        votes: CastVotes = nobody_votes,
    ) -> None:
        self.orders = orders
        self.scores = scores
        self.votes = votes
        self.text = text
        self.beat = beat
        self.context = context
        self.prompts = [text(order.prompt_ids.tolist()) for order in orders]
        self.firsts = list(accumulate((len(order.seeds) for order in orders), initial=0))

    def on_ended(self, ended: Sequence[EndedCompletion]) -> None:
        """The engine calls this every few tokens, with the completions that have ended since."""
        self.beat("decoding")
        self.scores.add({self.firsts[one.group] + one.index: self.job(one) for one in ended})

    def job(self, ended: EndedCompletion) -> ScoreJob:
        ids = ended.completion.ids.tolist()
        return ScoreJob(
            prompt=self.prompts[ended.group],
            completion=self.text(ids),
            completion_ids=ids,
            truncated=ended.completion.finish is Finish.LENGTH,
            columns=self.orders[ended.group].columns,
            context=self.context,
        )

    def played(self, episodes: Sequence[Episode]) -> tuple[Group, ...]:
        """Groups of finished episodes. What the environment has judged or failed at is not the verifier's."""
        for episode in episodes:
            job, ids = self.job(episode.ended()), episode.turn_ids()
            text = job.completion if episode.judged_text is None else episode.judged_text
            job = structs.replace(job, completion=text, completion_ids=ids, all_turns=self.text(ids))
            self.scores.add({self.firsts[episode.group] + episode.index: job})
        verdicts = [episode.verdict_over(verdict) for episode, verdict in zip(episodes, self.verdicts(), strict=True)]
        completions = iter([episode.completion() for episode in episodes])
        return self.scored([[next(completions) for _ in order.seeds] for order in self.orders], verdicts)

    def verdicts(self) -> list[Verdict]:
        """Wait for all verdicts, in the order of the completions."""
        return self.scores.verdicts(lambda: self.beat("scoring"))

    def groups(self, completions: list[list[Completion]]) -> tuple[Group, ...]:
        return self.scored(completions, self.verdicts())

    def scored(self, completions: list[list[Completion]], verdicts: list[Verdict]) -> tuple[Group, ...]:
        found = iter(verdicts)
        by_group = [[next(found) for _ in group] for group in completions]
        votes = self.votes(by_group, lambda: self.beat("scoring"))
        return fitting(tuple(map(scored_group, self.orders, completions, by_group, votes)))


def scored_group(
    order: GroupOrder,
    completions: list[Completion],
    verdicts: list[Verdict],
    votes: tuple[int, ...] | None = None,
) -> Group:
    """The record that the learner gets."""
    entropies = [one.entropies for one in completions if one.entropies is not None]
    return Group(
        group_id=order.group_id,
        prompt_ids=order.prompt_ids,
        completion_ids=np.concatenate([one.ids for one in completions]),
        trained=trained_of(completions),
        lengths=tuple(len(one.ids) for one in completions),
        logprobs=np.concatenate([one.logprobs for one in completions]),
        entropies=np.concatenate(entropies) if len(entropies) == len(completions) else None,
        finishes=tuple(one.finish for one in completions),
        outcomes=tuple(verdict.outcome for verdict in verdicts),
        scores=tuple(verdict.score for verdict in verdicts),
        rewards={name: tuple(verdict.rewards[name] for verdict in verdicts) for name in verdicts[0].rewards},
        metrics=metric_means(verdicts),
        extras=extras_by_name(verdicts),
        votes=votes,
    )


def metric_means(verdicts: Sequence[Verdict]) -> dict[str, float]:
    """Over the completions that were scored in a call that measured it."""
    logged = [verdict.metrics for verdict in verdicts]
    return {name: fmean(of[name] for of in logged if name in of) for name in names(logged)}


def extras_by_name(verdicts: Sequence[Verdict]) -> dict[str, tuple[str, ...]]:
    logged = [verdict.extras for verdict in verdicts]
    return {name: tuple(of.get(name, "") for of in logged) for name in names(logged)}


def fitting(groups: tuple[Group, ...]) -> tuple[Group, ...]:
    """The same groups, with long extras cut until all fit into one message. If that is not enough, they are removed."""
    most = 4 * MAX_EXTRA_CHARS
    while most and any(group.extras for group in groups) and sum(map(body_bytes, groups)) > GROUPS_BYTES:
        most //= 2
        groups = tuple(structs.replace(group, extras=shortened(group.extras, most)) for group in groups)
    return groups


def shortened(extras: Mapping[str, Sequence[str]], most: int) -> dict[str, tuple[str, ...]]:
    """Texts of at most so many bytes, without half characters; none for 0."""
    if not most:
        return {}
    return {name: tuple(text.encode()[:most].decode(errors="ignore") for text in of) for name, of in extras.items()}


def names(mappings: Iterable[Mapping[str, object]]) -> list[str]:
    """Of all of them. Functions may choose any; the wire takes only so many."""
    return list(dict.fromkeys(name for one in mappings for name in one))[:MAX_KEYS]


def trained_of(completions: list[Completion]) -> np.ndarray | None:
    """[S] of the group; None if every token was sampled."""
    if all(one.trained is None for one in completions):
        return None
    return np.concatenate(
        [np.ones(len(one.ids), np.uint8) if one.trained is None else one.trained for one in completions]
    )
