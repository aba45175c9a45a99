"""Orders follow measured speed: who gets the next one, who waits, and what is said of it."""

from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import pytest

from actor.engines.engine import Completion
from learner.orders.pace import Busy
from protocol.messages import Finish, GroupOrder, Order, Sampling
from shared.run.summary import ActorsReport
from tests.support.dispatch_bench import POLICY, Bench, inbox, with_group
from tests.support.fakes import ScriptedEngine, filled, toy_orders
from tests.support.memory_transport import MemoryActorPort

TOKENS = 6
"""Of an order: two completions of three."""


class EvenEngine(ScriptedEngine):
    """All completions have the same length, so that times can be computed by hand."""

    def completion(self, group: GroupOrder, seed: int, sampling: Sampling) -> Completion:
        ids = np.array([1, 2, 3], np.int32)
        return Completion(ids=ids, logprobs=-ids.astype(np.float32), entropies=None, finish=Finish.STOP)


class Crew:
    """Actors that take so many seconds for an order, and a clock that stands while nobody works."""

    def __init__(self, seconds: Mapping[str, float], num_credits: int = 2) -> None:
        self.now = 0.0
        self.bench = Bench(now=lambda: self.now)
        self.seconds = dict(seconds)
        self.ports: dict[str, MemoryActorPort] = {
            name: self.bench.actor(name, num_credits=num_credits) for name in seconds
        }
        self.has: dict[str, list[Order]] = {name: [] for name in seconds}
        self.free_at = dict.fromkeys(seconds, 0.0)
        self.filled: Counter[str] = Counter()

    def take(self) -> None:
        for name, port in self.ports.items():
            orders = [message for message in inbox(port) if isinstance(message, Order)]
            if orders and not self.has[name]:
                self.free_at[name] = self.now + self.seconds[name]
            self.has[name] += orders

    def step(self, orders: list[Order]) -> float:
        """Until all are filled; the seconds that it took."""
        start, missing = self.now, {order.order_id for order in orders}
        self.bench.dispatcher.submit(orders)
        self.take()
        while missing:
            missing.discard(self.fill_next([name for name, has in self.has.items() if has]).order_id)
        return self.now - start

    def rest(self) -> "Crew":
        """Until nobody has an order: at first some are filled twice, because nobody is trusted yet."""
        while names := [name for name, has in self.has.items() if has]:
            self.fill_next(names)
        self.filled.clear()
        return self

    def fill_next(self, names: Sequence[str]) -> Order:
        """Whoever is ready first delivers."""
        name = min(names, key=self.free_at.__getitem__)
        self.now, order = self.free_at[name], self.has[name].pop(0)
        self.free_at[name] = self.now + self.seconds[name]
        self.filled[name] += 1
        self.bench.deliver(self.ports[name], filled(order, POLICY, EvenEngine()))
        self.take()
        return order

    def report(self) -> ActorsReport:
        return self.bench.dispatcher.peers.report()


def orders(step: int, count: int) -> list[Order]:
    return toy_orders(step, count=count)


# --- who gets the next order


@pytest.mark.parametrize(
    ("finish", "others", "waiting", "worth"),
    [
        (4.0, [], 1, True),
        # The other has two orders and fills one a second: the last one would be filled after three.
        (4.0, [(2, 1.0)], 1, False),
        (3.0, [(2, 1.0)], 1, True),
        # Two in its hands and two that wait: four seconds.
        (4.0, [(2, 1.0)], 2, True),
        # Two others: the first that could take one more would have filled it after two seconds.
        (2.4, [(1, 1.0), (1, 1.0)], 1, False),
        (2.0, [(1, 1.0), (1, 1.0)], 1, True),
    ],
)
def test_an_order_is_worth_taking_if_the_others_would_not_have_filled_it_sooner(
    finish: float, others: list[tuple[int, float]], waiting: int, worth: bool
) -> None:
    has = {f"other{number}": one for number, one in enumerate(others)}
    assert Busy(has).is_worth("asked", finish, waiting) is worth
    assert Busy(has | {"asked": (3, 1.0)}).is_worth("asked", finish, waiting) is worth, (
        "what it has itself is not asked"
    )
    busy = Busy({name: (orders - 1, pace) for name, (orders, pace) in has.items() if orders > 1})
    for name, (_, pace) in has.items():
        busy.gave(name, pace)
    assert busy.is_worth("asked", finish, waiting) is worth, "given one by one"


def test_who_is_busy_may_be_changed_without_a_look_at_all_of_them() -> None:
    """Against a sum and a minimum over all others, after each of many orders."""
    rng = np.random.default_rng(0)
    paces = {f"actor{number}": float(rng.uniform(0.5, 2.0)) for number in range(20)}
    has: dict[str, int] = {}
    busy = Busy({})
    for _ in range(500):
        name, waiting = str(rng.choice(list(paces))), int(rng.integers(1, 30))
        finish = (has.get(name, 0) + 1) / paces[name]
        others = [(orders, paces[other]) for other, orders in has.items() if other != name]
        soonest = min(((orders + 1) / pace for orders, pace in others), default=np.inf)
        all_filled = (
            (waiting + sum(orders for orders, _ in others)) / sum(pace for _, pace in others) if others else 0.0
        )
        assert busy.is_worth(name, finish, waiting) is (finish <= max(soonest, all_filled))
        busy.gave(name, paces[name])
        has[name] = has.get(name, 0) + 1


def test_a_fast_actor_gets_more_and_a_slow_one_does_not_keep_the_last_order() -> None:
    crew = Crew({"fast": 1.0, "slow": 4.0})
    crew.step(orders(0, 8))
    crew.rest()
    # The best of all divisions: seven seconds for the fast one, four of which the slow one needs for its order.
    assert crew.step(orders(1, 8)) == 7.0
    assert crew.filled == {"fast": 7, "slow": 1}


def test_equal_actors_share_equally_and_few_orders_go_to_the_fastest() -> None:
    crew = Crew({"a": 1.0, "b": 1.0, "c": 1.0})
    crew.step(orders(0, 9))
    crew.rest()
    assert crew.step(orders(1, 9)) == 3.0
    assert set(crew.filled.values()) == {3}
    uneven = Crew({"a": 3.0, "b": 1.0})
    uneven.step(orders(0, 8))
    uneven.rest()
    assert uneven.step(orders(1, 1)) == 1.0 and uneven.filled == {"b": 1}


def test_actors_of_nearly_the_same_speed_are_not_kept_waiting() -> None:
    crew = Crew({f"actor{number}": 1.0 + 0.03 * number for number in range(8)})
    crew.step(orders(0, 16))
    crew.rest()
    assert crew.step(orders(1, 8)) == pytest.approx(1.21) and set(crew.filled.values()) == {1}


def test_a_first_order_that_took_long_is_forgotten() -> None:
    crew = Crew({"a": 1.0, "b": 9.0})
    crew.bench.dispatcher.submit(orders(0, 4))
    crew.take()
    crew.seconds["b"] = 1.0
    crew.rest()
    assert crew.step(orders(1, 8)) == 4.0, "both work"


def test_one_that_was_slow_for_a_while_is_tried_again_in_time() -> None:
    crew = Crew({"a": 1.0, "b": 8.0})
    for step in range(4):
        crew.step(orders(step, 16))
    crew.rest().seconds["b"] = 1.0
    took = [crew.step(orders(step, 4)) for step in range(4, 154)]
    first = next(step for step, seconds in enumerate(took) if seconds != 4.0)
    # It gets nothing while `a` alone is sooner ready, until two actors like `a` would have filled 30 x 8 orders each.
    assert 100 < first < 130
    assert took[first + 2 :] == [2.0] * (len(took) - first - 2)


def test_an_order_does_not_wait_for_a_fast_actor_that_hangs() -> None:
    crew = Crew({"fast": 1.0, "slow": 4.0})
    crew.step(orders(0, 8))
    crew.rest()
    peers = {peer.actor_id: peer for peer in crew.bench.dispatcher.peers.by_address.values()}
    crew.bench.dispatcher.submit(orders(1, 3))
    assert [len(peers[name].orders) for name in ("fast", "slow")] == [2, 0], "the slow one would be later"
    for seconds, num_slow in ((1.9, 0), (0.2, 1)):
        crew.now += seconds
        crew.bench.dispatcher.pump()
        assert len(peers["slow"].orders) == num_slow, crew.now


@pytest.mark.parametrize("right", [True, False])
def test_one_whose_first_orders_others_have_filled_sooner_is_relied_on_if_it_filled_them_right(right: bool) -> None:
    crew = Crew({"fast": 1.0, "slow": 4.0})
    crew.step(orders(0, 4))
    assert crew.filled["fast"] == 4, "nobody knew the slow one yet, so its orders went to the other too"
    peers = crew.bench.dispatcher.peers
    (slow,) = [peer for peer in peers.by_address.values() if peer.actor_id == "slow"]
    assert not peers.trusted(slow)
    late = filled(crew.has["slow"].pop(0), POLICY, EvenEngine())
    crew.now = 4.0
    wrong = with_group(late, completion_ids=late.groups[0].completion_ids + 1000)
    crew.bench.deliver(crew.ports["slow"], late if right else wrong)
    assert peers.trusted(slow) == right
    assert peers.report().actors["slow"].tokens_per_s == (TOKENS / 4.0 if right else 0.0)


def test_nobody_knows_how_fast_a_newcomer_is_so_it_gets_an_order() -> None:
    crew = Crew({"fast": 1.0})
    crew.step(orders(0, 4))
    newcomer = crew.bench.actor("new")
    crew.bench.dispatcher.submit(orders(1, 3))
    assert [type(message) for message in inbox(newcomer)][-1:] == [Order]


# --- what is said of it


def test_a_report_has_the_pace_the_waiting_the_faults_and_the_version_of_each() -> None:
    crew = Crew({"fast": 1.0, "slow": 4.0})
    crew.step(orders(0, 8))
    crew.rest().report()
    crew.step(orders(1, 8))
    found = crew.report()
    fast, slow = found.actors["fast"], found.actors["slow"]
    assert (fast.tokens_per_s, slow.tokens_per_s) == (TOKENS / 1.0, TOKENS / 4.0)
    assert (fast.waiting, slow.waiting) == (0.0, pytest.approx(3 / 7, abs=1e-4))
    assert (fast.faults, fast.version) == (0, 0)
    assert found.limited == {"rollout.prompts": pytest.approx(3 / 14)}, "an order is one group already"


def test_faults_are_orders_that_others_had_to_fill() -> None:
    crew = Crew({"good": 1.0, "bad": 1.0})
    crew.bench.dispatcher.submit(orders(0, 4))
    crew.take()
    lost = len(crew.has["bad"])
    crew.ports["bad"].close()
    crew.now += 1.0
    crew.bench.deliver(crew.ports["good"], filled(crew.has["good"][0], POLICY))
    crew.bench.dispatcher.probe(next(p for p in crew.bench.dispatcher.peers.by_address.values() if p.actor_id == "bad"))
    found = crew.report().actors
    assert (found["bad"].faults, found["bad"].waiting) == (lost, 1.0), "who has left has no order"
    assert lost == 2
    assert found["good"].faults == 0


def test_one_actor_has_nobody_to_be_compared_with() -> None:
    crew = Crew({"alone": 1.0})
    crew.step(orders(0, 4))
    assert crew.report() == ActorsReport()


def test_orders_of_several_groups_are_the_limit_where_they_can_be_divided() -> None:
    crew = Crew({"a": 1.0, "b": 1.0})
    crew.step(orders(0, 4))
    crew.rest().report()
    whole = orders(1, 3)
    together = [msgspec.structs.replace(whole[0], groups=tuple(group for order in whole for group in order.groups))]
    assert crew.step(together) == 1.0
    assert crew.report().limited == {"rollout.groups_per_order": 0.5}


def test_a_single_credit_is_the_limit_where_the_way_is_long() -> None:
    # The actors say that they decode and score for 0.75 s of each two; the rest is the way.
    crew = Crew({"a": 2.0, "b": 2.0}, num_credits=1)
    crew.step(orders(0, 8))
    (key, share), *_ = crew.report().limited.items()
    assert key == "link.credits" and share == pytest.approx(6 * 1.25 / (2 * 8.0))
    deep = Crew({"a": 2.0, "b": 2.0}, num_credits=2)
    deep.step(orders(0, 8))
    assert deep.report().limited == {}
