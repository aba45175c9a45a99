"""Who is there, what each holds, who has gone."""

import time

from learner.peers import Peers
from protocol.messages import Hello
from tests.fakes import hello_of, scripted_identity

FOREVER_S = 3600.0


def hello(actor_id: str = "actor0", num_credits: int = 2) -> Hello:
    return hello_of(scripted_identity(), actor_id, num_credits)


def test_a_stranger_is_nobody() -> None:
    peers = Peers(FOREVER_S)
    assert peers.get(b"a") is None
    assert peers.leave(b"a") == []
    assert peers.next_free() is None


def test_credits_are_what_is_not_held() -> None:
    peers = Peers(FOREVER_S)
    peers.join(b"a", hello(num_credits=2))
    peer = peers.next_free()
    assert peer is not None and peer.address == b"a" and peer.free == 2
    peer.holding.append("train/000000/u0000")
    assert peer.free == 1
    peer.holding.append("train/000000/u0001")
    assert peers.next_free() is None


def test_work_goes_where_most_credits_are_left() -> None:
    peers = Peers(FOREVER_S)
    peers.join(b"a", hello("a", 2))
    peers.join(b"b", hello("b", 3))
    busy = peers.next_free()
    assert busy is not None and busy.address == b"b"
    busy.holding += ["one", "two"]
    other = peers.next_free()
    assert other is not None and other.address == b"a"


def test_a_second_hello_gives_back_what_may_have_been_lost() -> None:
    peers = Peers(FOREVER_S)
    assert peers.join(b"a", hello()) == []
    peers.by_address[b"a"].holding.append("one")
    assert peers.join(b"a", hello()) == ["one"]
    assert list(peers.by_address) == [b"a"] and peers.by_address[b"a"].holding == []


def test_a_new_life_replaces_the_former_and_orphans_what_it_held() -> None:
    peers = Peers(FOREVER_S)
    peers.join(b"a-1", hello("a"))
    peers.join(b"b-1", hello("b"))
    peers.by_address[b"a-1"].holding += ["one", "two"]
    peers.by_address[b"b-1"].holding += ["three"]
    assert peers.join(b"a-2", hello("a")) == ["one", "two"]
    assert set(peers.by_address) == {b"a-2", b"b-1"}
    assert peers.by_address[b"a-2"].holding == []


def test_leaving_gives_back_what_was_held() -> None:
    peers = Peers(FOREVER_S)
    peers.join(b"a", hello())
    peers.by_address[b"a"].holding.append("one")
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
    assert peers.idle() is None
    peers.join(b"a", hello("actor0"))
    peers.by_address[b"a"].holding.append("one")
    assert peers.idle() is None
    peers.join(b"b", hello("actor1"))
    found = peers.idle()
    assert found is not None and found.address == b"b"
