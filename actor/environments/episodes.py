"""Plays the completions of an order with their environments, turn by turn.

    reset all -> [ all take a turn -> those that called tools get the answers ] until none goes on -> rewards

Turns are synchronous: the next one is decoded when all environments have answered. So the shapes of a batch follow from
tokens and answers alone, and the same order gives the same tokens, as long as the environments answer alike. The cap
counts all tokens after the question. An episode ends when a turn calls no tool, at environment.max_turns, at the cap,
or with a fault of its environment; what was sampled until then is kept, so a group always has its completions.
An answer for which there is no room is left out, and the completion is truncated.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from msgspec import structs

from actor.engines.engine import Completion, EndedCompletion, Engine
from actor.environments.contract import ToolCall
from actor.environments.pool import EnvironmentPool, Lost, fault_of
from actor.environments.worker import Answered, Call, GetReward, Opened, Reset, Rewarded, Use
from actor.verifiers.reward_function import verdict
from actor.verifiers.verdict import Verdict, fault
from protocol.messages import Finish, GroupOrder, Order, Outcome, Sampling
from shared.config.environment import EnvironmentConfig
from shared.model.conversation import Conversation

Beat = Callable[[str], None]


class Episode:
    """A completion while it is played."""

    def __init__(self, group: int, index: int, order: GroupOrder) -> None:
        self.group, self.index, self.order = group, index, order
        self.parts: list[Completion] = []
        """Turns, and what is between them."""
        self.turns = 0
        self.finish = Finish.STOP
        self.fault: Lost | None = None
        self.reward: Rewarded | None = None
        self.judged_text: str | None = None
        """What the verifier reads; None for the whole last turn."""

    @property
    def length(self) -> int:
        return sum(len(part.ids) for part in self.parts)

    @property
    def last_turn(self) -> Completion:
        return self.parts[-1]

    def put(self, ids: Sequence[int]) -> None:
        """Tokens that are not sampled."""
        zeros = np.zeros(len(ids), np.float32)
        self.parts.append(
            Completion(
                ids=np.array(ids, np.int32),
                logprobs=zeros,
                entropies=zeros,
                trained=np.zeros(len(ids), np.uint8),
                finish=Finish.STOP,
            )
        )

    def take(self, turn: Completion, cap: int) -> None:
        """A turn; what is beyond the cap was sampled along with others and is dropped."""
        room = cap - self.length
        cut = len(turn.ids) > room
        entropies = None if turn.entropies is None else turn.entropies[:room]
        self.finish = Finish.LENGTH if cut else turn.finish
        self.parts.append(
            Completion(
                ids=turn.ids[:room],
                logprobs=turn.logprobs[:room],
                entropies=entropies,
                trained=np.ones(min(len(turn.ids), room), np.uint8),
                finish=self.finish,
            )
        )
        self.turns += 1

    def next_order(self) -> GroupOrder:
        """All that comes before the next turn."""
        ids = np.concatenate([self.order.prompt_ids, *(part.ids for part in self.parts)])
        return structs.replace(self.order, prompt_ids=ids, seeds=(self.order.seeds[self.index],))

    def completion(self) -> Completion:
        entropies = [part.entropies for part in self.parts if part.entropies is not None]
        told = all(part.entropies is not None for part in self.parts)
        return Completion(
            ids=np.concatenate([part.ids for part in self.parts]),
            logprobs=np.concatenate([part.logprobs for part in self.parts]),
            entropies=np.concatenate(entropies) if told else None,
            trained=np.concatenate([part.trained for part in self.parts if part.trained is not None]),
            finish=self.finish,
        )

    def ended(self) -> EndedCompletion:
        """For the verifier: what the model said last."""
        last = structs.replace(self.last_turn, finish=self.finish)
        return EndedCompletion(group=self.group, index=self.index, completion=last)

    def turn_ids(self) -> list[int]:
        """For functions: all turns, with what is between them. What is before the first belongs to the question."""
        return np.concatenate([part.ids for part in self.parts[1:]]).tolist()

    def verdict_over(self, found: Verdict) -> Verdict:
        """The environment's fault, else that of a named reward, else the environment's reward if it has one."""
        if self.fault:
            lost = fault(self.fault.outcome, self.fault.note)
            return with_logged(lost, structs.replace(found, rewards=dict.fromkeys(found.rewards, 0.0)))
        if self.reward is None or found.outcome in (Outcome.ERROR, Outcome.TIMEOUT):
            return found
        return with_logged(verdict(self.reward.value, truncated=self.finish is Finish.LENGTH), found)


def with_logged(judged: Verdict, found: Verdict) -> Verdict:
    """With the named rewards of another verdict, and what the functions logged."""
    return structs.replace(judged, rewards=found.rewards, metrics=found.metrics, extras=found.extras)


class Player(Protocol):
    """Plays the completions of orders over several turns: Episodes, or agents.py."""

    def play(self, order: Order, engine: Engine, beat: Beat) -> list[Episode]: ...

    def close(self) -> None: ...


class Episodes:
    """Plays orders with one pool of environments."""

    def __init__(
        self, pool: EnvironmentPool, conversation: Conversation, config: EnvironmentConfig, *, scores: bool
    ) -> None:
        """scores: whether `get_reward` is asked."""
        self.pool, self.conversation, self.config, self.scores = pool, conversation, config, scores

    def play(self, order: Order, engine: Engine, beat: Beat) -> list[Episode]:
        """All completions of an order, in their order."""
        episodes = all_episodes(order)
        seats = dict(enumerate(episodes))
        self.open(seats, order.sampling.max_new_tokens, beat)
        live = seats
        while live:
            take_turns(live, order.sampling, engine, beat)
            live = self.answered(live, order.sampling.max_new_tokens, beat)
        if self.scores:
            self.judge({seat: episode for seat, episode in seats.items() if not episode.fault}, beat)
        return episodes

    def open(self, seats: dict[int, Episode], cap: int, beat: Beat) -> None:
        """Reset all. An environment that fails here has its completion all the same, of one turn."""
        found = ask(
            self.pool, {seat: Reset(columns=episode.order.columns) for seat, episode in seats.items()}, seats, beat
        )
        for seat, episode in seats.items():
            answer = found.get(seat)
            ids = self.conversation.opening_ids(answer.text if isinstance(answer, Opened) else "")
            if len(ids) >= cap:
                note = f"`reset` says {len(ids)} tokens, and the cap is {cap}."
                episode.fault = episode.fault or Lost(outcome=Outcome.ABSTAIN, note=note)
                ids = self.conversation.opening_ids("")[: cap - 1]
            episode.put(ids)

    def answered(self, live: dict[int, Episode], cap: int, beat: Beat) -> dict[int, Episode]:
        """Those that go on, with their tools' answers."""
        calls: dict[int, Use] = {}
        for seat, episode in live.items():
            if episode.fault or episode.finish is Finish.LENGTH:
                continue
            ids = episode.last_turn.ids.tolist()
            asked = self.conversation.calls(ids)
            if asked and episode.turns < self.config.max_turns:
                calls[seat] = Use(calls=[ToolCall(name=name, arguments=arguments) for name, arguments in asked])
            elif asked:
                # The arguments of a call that nobody answers are no final answer.
                episode.judged_text = self.conversation.before_calls(ids)
        going: dict[int, Episode] = {}
        for seat, answer in ask(self.pool, {**calls}, live, beat).items():
            episode = live[seat]
            if not isinstance(answer, Answered):
                continue
            ids = self.conversation.answer_ids([call.name for call in calls[seat].calls], answer.texts)
            if episode.length + len(ids) < cap:
                episode.put(ids)
                going[seat] = episode
            else:
                episode.finish = Finish.LENGTH
        return going

    def judge(self, seats: dict[int, Episode], beat: Beat) -> None:
        for seat, answer in ask(self.pool, dict.fromkeys(seats, GetReward()), seats, beat).items():
            if isinstance(answer, Rewarded):
                seats[seat].reward = answer

    def close(self) -> None:
        self.pool.close()


def all_episodes(order: Order) -> list[Episode]:
    """In their order."""
    return [
        Episode(group, index, ordered)
        for group, ordered in enumerate(order.groups)
        for index in range(len(ordered.seeds))
    ]


def take_turns(live: dict[int, Episode], sampling: Sampling, engine: Engine, beat: Beat) -> None:
    """In the first turn, completions of a group whose environments said the same share their prompt."""
    first = all(episode.turns == 0 for episode in live.values())
    shared: dict[tuple[object, ...], list[Episode]] = {}
    for seat, episode in live.items():
        same = (episode.group, episode.parts[0].ids.tobytes()) if first else (seat,)
        shared.setdefault(same, []).append(episode)
    groups = tuple(
        structs.replace(several[0].next_order(), seeds=tuple(episode.order.seeds[episode.index] for episode in several))
        for several in shared.values()
    )
    room = sampling.max_new_tokens - min(episode.length for episode in live.values())
    taken = engine.take_turn(groups, structs.replace(sampling, max_new_tokens=room), lambda _: beat("decoding"))
    for several, completions in zip(shared.values(), taken, strict=True):
        for episode, completion in zip(several, completions, strict=True):
            episode.take(completion, sampling.max_new_tokens)


def ask(pool: EnvironmentPool, calls: dict[int, Call], episodes: dict[int, Episode], beat: Beat) -> dict[int, object]:
    """The answers; an episode whose environment failed is over."""
    found = pool.ask(calls, lambda: beat("environments"))
    for seat, answer in found.items():
        episodes[seat].fault = episodes[seat].fault or fault_of(answer)
    return {seat: answer for seat, answer in found.items() if not fault_of(answer)}
