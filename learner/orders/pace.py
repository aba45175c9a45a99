"""How fast each actor fills orders, who should get the next one, and what keeps actors without work.

    pace      tokens of its last orders / seconds it had them, by the learner's clock, so nobody can claim to be fast
    finish    (orders it has + 1) / pace: when it would have filled one more
    others    the later of: when the other busy actors would have filled all open orders, and when the first of them
              would have filled one more

The next order goes to the actor that would finish it first. If even that is later than `others`, it waits: a slow actor
that takes the last order of a step keeps all the others waiting. A busy actor that takes twice as long as usual is not
counted there, so no order waits for one that hangs. Orders are taken as equal in size, as those of a step are. Which
actor fills an order changes no token.

    limited   share of the actors' time that was lost, by the key of the configuration that would give it back:
              rollout.groups_per_order   no order while others had some, and an order has several groups
              rollout.prompts            the same, and an order is one group already
              link.credits               the way to the learner and back, while orders were waiting there
"""

import math
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from shared.run.summary import ActorFigures, ActorsReport

RECENT = 0.3
"""Weight of the last order in a mean."""
MEASURED = 2
"""Orders from which a pace is known. The first one is forgotten with the second: an engine warms up in it."""
RETRY = 30
"""An actor that got nothing while each actor as fast as usual filled so many orders, times how much slower it was, is
tried again: it may have been slow for a while only."""
OVERDUE = 2.0
LEAST_S = 1e-6
WORTH_NAMING = 0.05
"""A limit that costs less of the actors' time is not named."""


@dataclass(kw_only=True)
class Pace:
    """Of one actor, over all its processes."""

    orders: int = 0
    """That it has filled since it was last tried again."""
    filled_at: int = 0
    """Orders that all actors had filled when it filled its last one."""
    tokens: float = 0.0
    """Of an order, a mean of the last ones; 0 before the first, like the next."""
    seconds: float = 0.0
    """That it had an order for."""
    version: int = 0
    """Policy of the last order that it filled."""
    faults: int = 0
    """Orders that it was given and others had to fill."""
    waited_s: float = 0.0
    """Without an order, or for its turn, since the last report."""

    @property
    def per_s(self) -> float:
        """Tokens; 0 before its first order."""
        return self.tokens / self.seconds if self.seconds else 0.0

    def observe(self, tokens: int, seconds: float) -> None:
        self.orders += 1
        weight = 1.0 if self.orders <= MEASURED else RECENT
        self.tokens += weight * (tokens - self.tokens)
        self.seconds += weight * (max(seconds, LEAST_S) - self.seconds)

    def is_overdue(self, seconds: float) -> bool:
        """Whether it has had an order for too long to be counted on."""
        return seconds > OVERDUE * self.seconds


class Busy:
    """The actors that have orders and are counted on. Sums over them are kept, so that giving out many orders needs no
    look at all of them for each."""

    def __init__(self, has: Mapping[str, tuple[int, float]]) -> None:
        """has: by actor id, its orders and its pace."""
        self.has = dict(has)
        self.orders = sum(orders for orders, _ in has.values())
        self.pace = math.fsum(pace for _, pace in has.values())
        self.soonest = [((orders + 1) / pace, actor_id) for actor_id, (orders, pace) in has.items()]
        """A heap of when each would have filled one more; entries that no longer hold are skipped."""
        heapify(self.soonest)

    def gave(self, actor_id: str, pace: float) -> None:
        """It has one more order."""
        before = self.has.get(actor_id)
        orders = before[0] + 1 if before else 1
        self.has[actor_id] = orders, pace
        self.orders += 1
        self.pace += 0.0 if before else pace
        heappush(self.soonest, ((orders + 1) / pace, actor_id))

    def is_worth(self, actor_id: str, finish: float, waiting: int) -> bool:
        """Whether an actor should take an order that it would finish then. waiting: orders that nobody has, this one
        included."""
        own_orders, own_pace = self.has.get(actor_id, (0, 0.0))
        if len(self.has) == (actor_id in self.has) or finish <= self.soonest_but(actor_id):
            return True
        pace = self.pace - own_pace
        return pace <= 0.0 or finish <= (waiting + self.orders - own_orders) / pace

    def soonest_but(self, actor_id: str) -> float:
        """When the first of the others would have filled one more."""
        own: list[tuple[float, str]] = []
        while self.soonest[0][1] == actor_id or not self.holds(*self.soonest[0]):
            entry = heappop(self.soonest)
            own += [entry] if self.holds(*entry) else []
        found = self.soonest[0][0]
        for entry in own:
            heappush(self.soonest, entry)
        return found

    def holds(self, finish: float, actor_id: str) -> bool:
        orders, pace = self.has[actor_id]
        return finish == (orders + 1) / pace


class Paces:
    """Of all actors that have joined, by actor id."""

    def __init__(self, now: float) -> None:
        self.of: dict[str, Pace] = {}
        self.filled = 0
        """Orders, by all of them."""
        self.usual = 1.0
        """Tokens a second of an actor that is not measured: as the others."""
        self.lost_s: defaultdict[str, float] = defaultdict(float)
        """Of all actors, by the key that would give it back."""
        self.divisible = False
        """Whether an order has several groups."""
        self.looked_at = self.reported_at = now

    def pace(self, actor_id: str, num_actors: int) -> float:
        """Tokens a second."""
        return self.of[actor_id].per_s if self.is_known(actor_id, num_actors) else self.usual

    def is_known(self, actor_id: str, num_actors: int) -> bool:
        found = self.of[actor_id]
        missed = (self.filled - found.filled_at) / num_actors
        return found.orders >= MEASURED and missed * found.per_s <= RETRY * self.usual

    def measure(self, actor_id: str, tokens: int, seconds: float, num_actors: int) -> None:
        """It has filled an order that it had for so long."""
        found = self.of[actor_id]
        if not self.is_known(actor_id, num_actors):
            found.orders = min(found.orders, MEASURED - 1)
        self.filled += 1
        found.filled_at = self.filled
        found.observe(tokens, seconds)
        self.usual = found.per_s

    def look(self, now: float, idle: Collection[str], *, busy: bool) -> None:
        """Count the time since the last look. idle: actors without an order. busy: whether others have some."""
        passed, self.looked_at = now - self.looked_at, now
        for actor_id in idle:
            self.of[actor_id].waited_s += passed
        if busy:
            self.lost_s["rollout.groups_per_order" if self.divisible else "rollout.prompts"] += passed * len(idle)

    def report(self, now: float, connected: Collection[str]) -> ActorsReport:
        """Of the time since the last one. A run with one actor has nothing to compare."""
        passed, self.reported_at = max(now - self.reported_at, LEAST_S), now
        by_name = sorted(self.of.items(), key=lambda item: (len(item[0]), item[0]))
        figures = {name: figures_of(pace, passed, there=name in connected) for name, pace in by_name}
        limited = {key: min(lost / (passed * max(len(connected), 1)), 1.0) for key, lost in self.lost_s.items()}
        self.lost_s.clear()
        for pace in self.of.values():
            pace.waited_s = 0.0
        if len(figures) < 2:
            return ActorsReport()
        largest = max(limited, key=limited.__getitem__, default="")
        named = {largest: limited[largest]} if limited.get(largest, 0.0) >= WORTH_NAMING else {}
        return ActorsReport(actors=figures, limited=named)


def figures_of(pace: Pace, passed: float, *, there: bool) -> ActorFigures:
    """there: whether it is connected; if not, it had no order."""
    return ActorFigures(
        tokens_per_s=round(pace.per_s, 1),
        waiting=round(min(pace.waited_s / passed, 1.0) if there else 1.0, 4),
        faults=pace.faults,
        version=pace.version,
    )
