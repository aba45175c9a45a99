"""Who is there, what each holds, who has gone."""

import random
import time

from msgspec import structs

from learner.orders.peers import Peer, Peers, Takers
from protocol.messages import Hello
from tests.support.fakes import hello_of, scripted_identity, toy_orders, toy_policy

FOREVER_S = 3600.0


def hello(actor_id: str = "actor0", num_credits: int = 2) -> Hello:
    return hello_of(scripted_identity(), actor_id, num_credits)


def next_free(peers: Peers) -> Peer | None:
    """Who gets an order of policy 0."""
    return Takers(peers, 0).next(1)


def test_an_unknown_address_has_no_peer() -> None:
    peers = Peers(FOREVER_S)
    assert peers.get(b"a") is None
    assert peers.leave(b"a") == []
    assert next_free(peers) is None


def test_credits_are_what_is_free() -> None:
    peers = Peers(FOREVER_S)
    peers.join(b"a", hello(num_credits=2))
    peer = next_free(peers)
    assert peer is not None and peer.address == b"a" and peer.free == 2
    peer.orders.append("train/000000/u0000")
    assert peer.free == 1
    peer.orders.append("train/000000/u0001")
    assert next_free(peers) is None


def test_work_goes_where_most_credits_are_left() -> None:
    peers = Peers(FOREVER_S)
    peers.join(b"a", hello("a", 2))
    peers.join(b"b", hello("b", 3))
    busy = next_free(peers)
    assert busy is not None and busy.address == b"b"
    busy.orders += ["one", "two"]
    other = next_free(peers)
    assert other is not None and other.address == b"a"


def test_a_second_hello_gives_nothing_back_unless_all_that_was_sent_has_been_read() -> None:
    peers = Peers(FOREVER_S)
    assert peers.join(b"a", hello()) == []
    peer = peers.by_address[b"a"]
    first = peer.fresh_mark()
    peer.orders.append("one")
    peer.sent(0)
    peer.marked = False
    for mark in (0, first):
        assert peers.greet_again(peer, structs.replace(hello(), mark=mark)) == []
        assert peer.orders == ["one"] and peer.doubted == {"one"} and peer.unread == {0}
    second = peer.fresh_mark()
    assert second != first and peer.fresh_mark() == second
    assert peers.greet_again(peer, structs.replace(hello(), mark=first)) == []
    assert peers.greet_again(peer, structs.replace(hello(), mark=second, version=7)) == ["one"]
    assert peer.orders == [] and peer.unread == set() and peer.version == 7


def test_who_fills_orders_comes_before_who_owes_and_before_newcomers() -> None:
    peers = Peers(FOREVER_S)
    for name in ("owes", "new", "filled"):
        peers.join(name.encode(), hello(name, 1 if name == "filled" else 9))
    owing, filling = peers.by_address[b"owes"], peers.by_address[b"filled"]
    peers.has_filled(filling, 0)
    peers.has_filled(owing, 0)
    peers.owe(owing, 1)
    order = []
    for _ in range(4):
        peer = next_free(peers)
        order.append(peer and peer.actor_id)
        if peer:
            peer.orders.append("x")
    # While somebody fills orders, the others hold one order at a time.
    assert order == ["filled", "new", "owes", None]
    peers.has_filled(owing, 0)
    assert next_free(peers) is owing


def test_two_policies_at_most_are_under_way_and_none_twice() -> None:
    peers = Peers(FOREVER_S)
    peers.join(b"a", hello())
    peer = peers.by_address[b"a"]
    assert peer.takes(1)
    peer.sent(1)
    assert peer.takes(1) and peer.takes(2)
    peer.sent(2)
    assert [version for version in range(5) if peer.takes(version)] == [2]
    peers.has_filled(peer, 1)
    assert [version for version in range(5) if peer.takes(version)] == [0, 1, 2, 3, 4]


def test_what_a_life_has_not_read_is_remembered_when_it_has_left() -> None:
    clock = [0.0]
    peers = Peers(10.0, lambda: clock[0])
    peers.join(b"a-1", hello("a"))
    peers.by_address[b"a-1"].sent(3)
    peers.leave(b"a-1")
    # Another connection waits behind the one that may still carry a policy, until that one is silent.
    assert peers.contest(b"a-2", "a") is not None
    peers.join(b"a-1", hello("a"))
    assert peers.by_address[b"a-1"].unread == {3}
    peers.leave(b"a-1")
    clock[0] = 11.0
    assert peers.contest(b"a-2", "a") is None
    peers.join(b"a-1", hello("a"))
    peers.leave(b"a-1", connected=False)
    assert peers.known(b"a-1") is None
    peers.join(b"a-1", hello("a"))
    assert peers.by_address[b"a-1"].unread == set()


def test_losing_a_peer_twice_does_not_forget_what_it_has_not_read() -> None:
    """As when two wrong orders of one peer arrive together."""
    peers = Peers(FOREVER_S)
    peers.join(b"a", hello())
    peers.by_address[b"a"].sent(1)
    assert peers.leave(b"a") == [] and peers.leave(b"a") == []
    peers.join(b"a", hello())
    assert peers.by_address[b"a"].unread == {1}


def test_a_new_life_replaces_the_former_and_orphans_its_orders() -> None:
    peers = Peers(FOREVER_S)
    peers.join(b"a-1", hello("a"))
    peers.join(b"b-1", hello("b"))
    peers.by_address[b"a-1"].orders += ["one", "two"]
    peers.by_address[b"b-1"].orders += ["three"]
    assert peers.join(b"a-2", hello("a")) == ["one", "two"]
    assert set(peers.by_address) == {b"a-2", b"b-1"}
    assert peers.by_address[b"a-2"].orders == []


def test_leaving_gives_back_its_orders() -> None:
    peers = Peers(FOREVER_S)
    peers.join(b"a", hello())
    peers.by_address[b"a"].orders.append("one")
    assert peers.leave(b"a") == ["one"]
    assert peers.get(b"a") is None


def test_silence_is_counted_from_the_last_word_of_each() -> None:
    peers = Peers(0.05)
    peers.join(b"a", hello("a"))
    peers.join(b"b", hello("b"))
    assert peers.silent() == []
    time.sleep(0.06)
    peers.get(b"b")
    assert [peer.address for peer in peers.silent()] == [b"a"]
    assert peers.heard_at == peers.by_address[b"b"].heard_at


def test_idle_is_who_holds_nothing() -> None:
    peers = Peers(silence_s=9.0)
    assert peers.idle() == []
    peers.join(b"a", hello("actor0"))
    peers.by_address[b"a"].orders.append("one")
    assert peers.idle() == []
    peers.join(b"b", hello("actor1"))
    assert [peer.address for peer in peers.idle()] == [b"b"]


# --- many orders for many peers


def crew(seed: int, count: int = 30) -> Peers:
    """Peers of all kinds: fast and slow, new and owing, waiting, overdue, with and without orders."""
    rng = random.Random(seed)
    peers = Peers(FOREVER_S, lambda: 100.0)
    orders = iter(toy_orders(1, count=9 * count))
    for number in range(count):
        address = f"{number}-1".encode()
        peers.join(address, hello(f"actor{number}", rng.randint(1, 4)))
        peer = peers.by_address[address]
        for _ in range(rng.randrange(peer.hello.credits + 1)):
            peers.gave(peer, next(orders))
            peer.sent(0)
        peer.began_at = rng.uniform(50.0, 100.0)
        if rng.random() < 0.8:
            peers.have_filled.add(peer.actor_id)
        if rng.random() < 0.2:
            peers.owe(peer, rng.randint(1, 2))
        if rng.random() < 0.2:
            peer.doubted = set(peer.orders)
        pace = peers.paces.of[peer.actor_id]
        pace.orders, pace.tokens, pace.seconds = rng.choice((0, 5)), rng.uniform(50, 100), rng.uniform(5.0, 60.0)
        peer.unread = rng.choice((set(), {0}, {7, 8}))
    peers.paces.usual = 4.0
    return peers


def slow_next(peers: Peers, version: int, waiting: int) -> Peer | None:
    """The formula of pace.py, with a look at all peers."""
    free = [peer for peer in peers.by_address.values() if peer.free > 0 and peer.takes(version)]
    free = [peer for peer in free if peers.is_preferred(peer) or not peer.orders]
    found = min(free, key=peers.rank, default=None)
    if found is None or not peers.trusted(found):
        return found
    others = [(len(peer.orders), peers.pace(peer)) for peer in peers.working() if peer is not found]
    if not others:
        return found
    soonest = min((orders + 1) / pace for orders, pace in others)
    all_filled = (waiting + sum(orders for orders, _ in others)) / sum(pace for _, pace in others)
    return found if peers.finish(found) <= max(soonest, all_filled) else None


def test_orders_that_are_given_out_together_go_where_they_would_go_one_by_one() -> None:
    more, given = toy_orders(2, count=40), 0
    for seed in range(40):
        peers = crew(seed)
        takers = Takers(peers, 0)
        for waiting in range(40, 0, -1):
            found = takers.next(waiting)
            assert found is slow_next(peers, 0, waiting), (seed, waiting)
            if found is None:
                break
            peers.gave(found, more[waiting - 1])
            found.sent(0)
            takers.gave()
            given += 1
    assert given > 200


class CountedPeers(Peers):
    looks = 0

    def rank(self, peer: Peer) -> tuple[int, bool, float, int]:
        self.looks += 1
        return super().rank(peer)


def test_a_thousand_orders_for_a_thousand_peers_are_no_million_looks() -> None:
    peers, orders = CountedPeers(FOREVER_S), toy_orders(count=500)
    for number in range(500):
        peers.join(f"{number}".encode(), hello(f"actor{number}"))
    takers = Takers(peers, 0)
    for order in orders:
        peer = takers.next(1)
        assert peer is not None
        peers.gave(peer, order)
        takers.gave()
    assert [len(peer.orders) for peer in peers.by_address.values()] == [1] * 500
    assert peers.looks == 1000
    assert peers.with_order(orders[7].order_id) == [peers.by_address[b"7"]]
    assert peers.leave(b"7") == [orders[7].order_id] and peers.with_order(orders[7].order_id) == []


def test_after_somebody_left_all_are_looked_at_again() -> None:
    peers = Peers(FOREVER_S)
    for name in ("a", "b"):
        peers.join(name.encode(), hello(name))
    takers = Takers(peers, 0)
    assert takers.still_hold(0) and not takers.still_hold(1)
    peers.leave(b"a")
    assert not takers.still_hold(0)
    takers.gave()


def on_machine(actor_id: str, machine: str | None) -> Hello:
    return structs.replace(hello(actor_id), machine=machine)


def gets_adapter(peers: Peers, address: bytes, version: int) -> bool:
    """Whether this peer is sent the policy with its adapter."""
    return len(peers.gave_policy(peers.by_address[address], toy_policy(version)).adapter) > 0


def test_one_actor_of_a_machine_gets_the_adapter_and_passes_it_on() -> None:
    peers = Peers(FOREVER_S)
    for name, machine in (("a", "m"), ("b", "m"), ("c", "m"), ("d", "other"), ("e", None), ("f", None)):
        peers.join(name.encode(), on_machine(name, machine))
    got = {name: gets_adapter(peers, name.encode(), 0) for name in "abcdef"}
    assert got == {"a": True, "b": False, "c": False, "d": True, "e": True, "f": True}
    sent = peers.gave_policy(peers.by_address[b"b"], toy_policy(1))
    assert len(sent.adapter), "whoever needs a version first passes it on"
    assert (sent.version, peers.by_address[b"b"].version, peers.by_address[b"b"].unread) == (1, 1, {0, 1})
    assert not gets_adapter(peers, b"a", 1)


def test_one_that_asks_again_or_has_left_passes_nothing_on() -> None:
    peers = Peers(FOREVER_S)
    for name in "abc":
        peers.join(name.encode(), on_machine(name, "m"))
    assert gets_adapter(peers, b"a", 0)
    assert gets_adapter(peers, b"a", 0), "it may have lost it"
    peers.leave(b"a")
    assert gets_adapter(peers, b"b", 0)
    assert not gets_adapter(peers, b"c", 0)
    peers.greet_again(peers.by_address[b"b"], on_machine("b", None))
    assert gets_adapter(peers, b"c", 0), "b says it gets each from the learner now"
    peers.join(b"a2", on_machine("a", "m"))
    assert not gets_adapter(peers, b"a2", 0)


def test_one_that_shows_that_its_policy_was_lost_passes_nothing_on() -> None:
    peers = Peers(FOREVER_S)
    for name in "ab":
        peers.join(name.encode(), on_machine(name, "m"))
    assert gets_adapter(peers, b"a", 0)
    peer = peers.by_address[b"a"]
    peers.greet_again(peer, structs.replace(on_machine("a", "m"), mark=peer.fresh_mark()))
    assert gets_adapter(peers, b"b", 0)


def test_idle_actors_do_not_wait_for_a_busy_one() -> None:
    peers = Peers(FOREVER_S)
    for name in ("busy", "busy too", "idle", "idle too"):
        peers.join(name.encode(), on_machine(name, "m"))
    for name in (b"busy", b"busy too"):
        peers.by_address[name].orders += ["older", "newer"]
    assert gets_adapter(peers, b"busy", 1)
    assert not gets_adapter(peers, b"busy too", 1), "it reads no sooner than the other"
    assert gets_adapter(peers, b"idle", 1)
    assert not gets_adapter(peers, b"idle too", 1)
    assert gets_adapter(peers, b"busy", 2)
    peers.has_filled(peers.by_address[b"busy"], 2)
    assert not gets_adapter(peers, b"idle", 2), "it has read it"


def test_who_passes_on_is_forgotten_with_its_policy() -> None:
    peers = Peers(FOREVER_S)
    peers.join(b"a", on_machine("a", "m"))
    for version in range(4):
        gets_adapter(peers, b"a", version)
    peers.machines.forget_before(2)
    assert sorted(peers.machines.bringers) == [2, 3]
