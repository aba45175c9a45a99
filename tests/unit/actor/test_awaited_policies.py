"""An actor whose policies another actor of its machine passes on: it waits, finds them, or asks the learner."""

import shutil
from pathlib import Path

import pytest
from msgspec.structs import replace

from actor.passed_on import PassedOn
from protocol.messages import Drain, Heartbeat, Hello, Policy, Welcome
from tests.support.fakes import filled, toy_orders, toy_policy
from tests.unit.actor.test_link import Table


def without_adapter(policy: Policy) -> Policy:
    return replace(policy, adapter=policy.adapter[:0])


def test_an_order_waits_for_the_policy_that_another_actor_passes_on(tmp_path: Path) -> None:
    passes = PassedOn(tmp_path / "adapters")
    table = Table(passed_on=passes)
    table.join()
    policy, (order,) = toy_policy(0), toy_orders(1)
    table.say(without_adapter(policy), order)
    # The first look finds nothing.
    table.link.wait_once("a policy")
    assert not table.link.policies and [queued.order_id for queued in table.link.orders] == [order.order_id]
    passes.keep(policy)
    taken, found = table.link.next_order() or pytest.fail("no order")
    assert taken.order_id == order.order_id
    assert found.adapter.tobytes() == policy.adapter.tobytes()
    assert not table.link.awaited and table.link.last_version == 0


def test_what_comes_over_the_network_is_written_for_the_others(tmp_path: Path) -> None:
    passes = PassedOn(tmp_path / "adapters")
    table = Table(passed_on=passes)
    table.join()
    table.say(toy_policy(0), *toy_orders(1))
    assert table.link.next_order()
    assert passes.find(without_adapter(toy_policy(0))) is not None


def test_a_policy_that_nobody_passes_on_is_asked_of_the_learner(tmp_path: Path) -> None:
    seconds = [0.0]
    table = Table(passed_on=PassedOn(tmp_path / "adapters"), now=lambda: seconds[0])
    table.join(heartbeat_s=2.0, silence_s=60.0)
    table.say(Welcome(run_id="run-1", heartbeat_s=2.0, silence_s=60.0, mark=9))
    table.say(without_adapter(toy_policy(3)), replace(toy_orders(1)[0], policy_version=3))
    table.link.wait_once("a policy")
    seconds[0] = 7.0
    table.link.wait_once("a policy")
    hello = next(message for message in table.received() if isinstance(message, Hello))
    assert hello.machine == table.link.hello.machine is not None
    assert hello.mark == 0, "it has not read everything"
    seconds[0] = 59.0
    table.say(Welcome(run_id="run-1", heartbeat_s=2.0, silence_s=60.0, mark=9))
    table.link.wait_once("a policy")
    assert table.link.orders
    table.received()
    seconds[0] = 61.0
    table.say(Heartbeat(phase="learning"))
    table.link.wait_once("a policy")
    assert not table.link.orders and not table.link.awaited
    seconds[0] = 66.0
    table.link.wait_once("an order")
    hello = next(message for message in table.received() if isinstance(message, Hello))
    assert (hello.machine, hello.mark, hello.version) == (None, 9, None)
    table.say(toy_policy(3), replace(toy_orders(1)[0], policy_version=3))
    taken, found = table.link.next_order() or pytest.fail("no order")
    assert (taken.policy_version, found.version) == (3, 3)


def test_an_actor_that_cannot_pass_on_asks_for_whole_policies_from_then_on(tmp_path: Path) -> None:
    seconds = [0.0]
    table = Table(passed_on=PassedOn(tmp_path / "adapters"), now=lambda: seconds[0])
    table.join(heartbeat_s=2.0, silence_s=600.0)
    shutil.rmtree(tmp_path / "adapters")
    table.say(without_adapter(toy_policy(1)))
    table.link.wait_once("a policy")
    seconds[0] = 61.0
    table.link.wait_once("a policy")
    table.say(toy_policy(1))
    table.link.wait_once("an order")
    assert 1 in table.link.policies and table.link.hello.machine is None
    (tmp_path / "adapters").mkdir()
    table.say(toy_policy(2))
    table.link.wait_once("an order")
    assert table.link.hello.machine is not None, "it works again"


def test_bytes_of_before_a_restart_are_not_taken_for_a_version_that_is_passed_on(tmp_path: Path) -> None:
    passes = PassedOn(tmp_path / "adapters")
    table = Table(passed_on=passes)
    table.join()
    table.say(toy_policy(3, b"old bytes"))
    table.link.wait_once("a policy")
    newer = toy_policy(3, b"new bytes")
    table.say(without_adapter(newer), replace(toy_orders(1)[0], policy_version=3))
    table.link.wait_once("a policy")
    assert 3 not in table.link.policies
    passes.keep(newer)
    _, found = table.link.next_order() or pytest.fail("no order")
    assert found.adapter.tobytes() == b"new bytes"


def test_a_policy_that_is_here_is_not_awaited(tmp_path: Path) -> None:
    table = Table(passed_on=PassedOn(tmp_path / "adapters"))
    table.join()
    table.say(toy_policy(3))
    table.link.wait_once("a policy")
    table.say(without_adapter(toy_policy(3)), replace(toy_orders(1)[0], policy_version=3))
    _, found = table.link.next_order() or pytest.fail("no order")
    assert len(found.adapter) and not table.link.awaited


def test_what_is_found_late_is_not_the_last_policy(tmp_path: Path) -> None:
    """The learner sends an order without a policy if it names the one that it sent last."""
    passes = PassedOn(tmp_path / "adapters")
    table = Table(num_credits=4, passed_on=passes)
    table.join()
    first, second, third = toy_orders(1, count=3)
    table.say(without_adapter(toy_policy(3)), replace(first, policy_version=3))
    table.say(toy_policy(4), replace(second, policy_version=4))
    table.link.wait_once("a policy")
    passes.keep(toy_policy(3))
    for version in (3, 4):
        order, policy = table.link.next_order() or pytest.fail("no order")
        assert policy.version == version
        table.link.deliver(filled(order, policy))
    table.say(replace(third, policy_version=4))
    _, policy = table.link.next_order() or pytest.fail("no order")
    assert policy.version == 4


def test_a_draining_actor_waits_for_no_policy(tmp_path: Path) -> None:
    table = Table(passed_on=PassedOn(tmp_path / "adapters"))
    table.join()
    table.say(without_adapter(toy_policy(0)), *toy_orders(1), Drain())
    assert table.link.next_order() is None
