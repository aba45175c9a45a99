"""What hostile actors do, for benchmarks/hostile_actors.py: an actor with a key of the run and a socket of its own."""

import threading
import time
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import zmq
from msgspec.structs import replace

from actor.rollout import Rollout
from benchmarks.fuzz_dispatcher import SPOILS
from learner.durable.journal import Journal
from learner.durable.recorder import VOID_ORDERS, orders_in, read
from protocol.access.key_list import add_key, list_keys
from protocol.access.keys import create_actor_key, load_actor_key
from protocol.codec import decode, encode
from protocol.messages import (
    AnyMessage,
    Bye,
    FilledOrder,
    Group,
    Heartbeat,
    Hello,
    Order,
    Outcome,
    Policy,
    Refused,
    Welcome,
)
from protocol.sockets import set_up_actor
from protocol.transport import new_identity
from shared.config.processes import dial_address
from shared.config.tree import Config
from shared.run.run_dir import RunDir
from tests.support.fakes import filled

PAUSE_S = 0.02
LOUD = "\nerror: all is lost \x1b[2J" + "x" * 60_000


Kind = Callable[["Hostile"], None]
"""What a hostile actor does again and again."""


class Hostile:
    """A hostile actor: its key, its socket, and what the learner has sent to it."""

    def __init__(self, run: RunDir, config: Config, hello: Hello, honest: Rollout, *, invited: bool) -> None:
        self.key = load_actor_key(create_actor_key(run.keys, "evil"))
        if invited:
            # As if the learner had added the key in place of an invitation.
            public = self.key.public.decode()
            (run.keys / "allowed" / "evil.json").unlink()
            add_key(run.keys, "evil", public, time.time())
        self.keys, self.journal = run.keys, run.journal
        self.honest = honest
        self.num_true = 0
        self.lies: dict[str, Group] = {}
        """Groups about which it said something false, by id; an order may come to it twice."""
        self.endpoint = dial_address(config.link, run.path)
        self.context = zmq.Context()
        self.hello = replace(hello, actor_id="evil", credits=1024)
        self.random = Random(0)
        self.mark = self.num_sent = self.num_refused = self.num_policies = 0
        self.fault = ""
        self.orders: list[Order] = []
        self.policies: dict[int, Policy] = {}
        self.dial()

    def dial(self) -> None:
        """A new connection."""
        self.socket = self.context.socket(zmq.DEALER)
        set_up_actor(self.socket, self.key, high_water_mark=1000, send_timeout_s=0.1, endpoint=self.endpoint)
        self.socket.linger = 0
        self.socket.routing_id = new_identity(self.key.actor_id)
        self.socket.connect(self.endpoint)

    def act(self, kind: Kind, over: threading.Event) -> None:
        """Until the run is over."""
        try:
            while not over.wait(PAUSE_S):
                kind(self)
        except Exception as error:
            self.fault = repr(error)

    def say(self, message: AnyMessage) -> None:
        """Send, unless the queue is full: the learner need not read."""
        try:
            self.socket.send_multipart(encode(message))
            self.num_sent += 1
        except zmq.Again:
            pass

    def greet(self) -> None:
        """As an honest actor does."""
        self.say(replace(self.hello, mark=self.mark, version=max(self.policies, default=None)))

    def read(self) -> None:
        """All that has arrived."""
        while self.socket.poll(0):
            message = decode(self.socket.recv_multipart())
            if isinstance(message, Welcome):
                self.mark = message.mark
            elif isinstance(message, Policy):
                self.policies[message.version] = message
                self.num_policies += 1
            elif isinstance(message, Order):
                self.orders.append(message)
            else:
                self.num_refused += isinstance(message, Refused)

    def right_groups(self) -> FilledOrder | None:
        """One that would be accepted in form; its numbers are made up."""
        known = [order for order in self.orders[-8:] if order.policy_version in self.policies]
        if not known:
            return None
        order = self.random.choice(known)
        return filled(order, self.policies[order.policy_version])

    def fill(self, lie: Callable[[Group], Group], true: int = 0, version: int | None = None) -> None:
        """Fill all orders as an honest actor does, and then say something false about each group. true: groups before
        the first lie. version: of the policy to sample with, if not the ordered one."""
        self.greet()
        self.socket.poll(200)
        self.read()
        for order in self.orders:
            ordered = self.policies.get(order.policy_version)
            if ordered is None:
                continue
            used = ordered if version is None else self.policies.get(version, ordered)
            done = self.honest.fill(order, used, lambda phase: None)
            tells_truth = self.num_true < true
            groups = done.groups if tells_truth else tuple(map(lie, done.groups))
            self.num_true += len(groups) * tells_truth
            stale = not tells_truth and used.sha256 != ordered.sha256
            pairs = zip(groups, done.groups, strict=True)
            self.lies |= {told.group_id: told for told, found in pairs if stale or is_false(told, found)}
            self.say(replace(done, policy_version=ordered.version, adapter_sha256=ordered.sha256, groups=groups))
        self.orders.clear()

    def revoked_for(self) -> str:
        """Why its key was revoked; empty if it was not."""
        return next((key.reason for key in list_keys(self.keys, 0.0) if key.state == "revoked"), "")

    def recorded_lies(self) -> int:
        """Lies that the learner recorded before it found the first one. Another actor's group may have come sooner."""
        payloads = [one for one in Journal.read(self.journal).records() if not one.startswith(VOID_ORDERS)]
        orders = [read(packed) for payload in payloads for packed in orders_in(payload).values()]
        return sum(is_same(group, self.lies.get(group.group_id)) for order in orders for group in order.groups)

    def figures(self) -> dict[str, Any]:
        """What it did and what it was sent; after the run."""
        return {
            "true_groups": self.num_true,
            "false_groups": self.recorded_lies(),
            "false_groups_sent": len(self.lies),
            "revoked_for": self.revoked_for(),
            "messages_sent": self.num_sent,
            "orders": len(self.orders),
            "policies": self.num_policies,
            "refused": self.num_refused,
            "fault": self.fault,
        }


def nonsense(actor: Hostile) -> None:
    """Fills every order at once, with one thing wrong, and says Hello again."""
    actor.greet()
    actor.orders.clear()
    actor.socket.poll(500)
    actor.read()
    if filled_order := actor.right_groups():
        actor.say(actor.random.choice(SPOILS)(actor.random, filled_order))


def unknown_ids(actor: Hostile) -> None:
    """Filled orders with ids that were never ordered."""
    actor.read()
    actor.greet()
    if filled_order := actor.right_groups():
        order_id = actor.random.choice(("train", "train/x/y", "\x1b[2J", "train/999999/u0000"))
        actor.say(replace(filled_order, order_id=order_id))


def hello_unread(actor: Hostile) -> None:
    """Says Hello without end and never reads."""
    actor.greet()


def hello_read(actor: Hostile) -> None:
    """Says Hello without end with the newest mark, as if every policy had been lost."""
    actor.read()
    actor.policies.clear()
    actor.greet()


def takes(actor: Hostile) -> None:
    """Takes orders, shows progress, fills none."""
    actor.read()
    if not actor.mark:
        actor.greet()
    actor.say(Heartbeat(phase="decoding"))


def reads_slowly(actor: Hostile) -> None:
    """Reads one message a second."""
    actor.greet()
    if actor.socket.poll(0):
        actor.socket.recv_multipart()
    time.sleep(1.0)


def is_loud(actor: Hostile) -> None:
    """Joins and leaves with escape codes and 60 kB of text."""
    actor.greet()
    actor.say(Bye(reason=LOUD))


def comes_and_goes(actor: Hostile) -> None:
    """Opens a new connection each second and leaves the old one without Bye."""
    actor.greet()
    time.sleep(1.0)
    actor.socket.close()
    actor.dial()


def is_false(told: Group, true: Group) -> bool:
    return not is_same(told, true)


def is_same(one: Group, other: Group | None) -> bool:
    return other is not None and one.outcomes == other.outcomes and np.array_equal(one.logprobs, other.logprobs)


def with_false_logprobs(group: Group) -> Group:
    """Higher than they are, as if the tokens were likelier."""
    return replace(group, logprobs=(0.9 * group.logprobs).astype(np.float32))


def with_false_rewards(group: Group) -> Group:
    """The first completion as right, the others as wrong: it teaches what the actor likes."""
    outcomes = (Outcome.CORRECT, *[Outcome.WRONG] * (len(group.outcomes) - 1))
    return replace(group, outcomes=outcomes, scores=tuple(float(one is Outcome.CORRECT) for one in outcomes))


def false_logprobs(actor: Hostile) -> None:
    """From its first group on."""
    actor.fill(with_false_logprobs)


def false_rewards(actor: Hostile) -> None:
    """From its first group on."""
    actor.fill(with_false_rewards)


def false_version(actor: Hostile) -> None:
    """Samples with the first policy it got, whatever was ordered, and has the log-probs of that one."""
    actor.fill(lambda group: group, version=min(actor.policies, default=0))


def false_logprobs_later(actor: Hostile) -> None:
    """After it was honest for a while."""
    actor.fill(with_false_logprobs, true=HONEST_GROUPS)


def false_rewards_later(actor: Hostile) -> None:
    """After it was honest for a while."""
    actor.fill(with_false_rewards, true=HONEST_GROUPS)


KINDS: tuple[Kind, ...] = (
    nonsense,
    unknown_ids,
    hello_unread,
    hello_read,
    takes,
    reads_slowly,
    is_loud,
    comes_and_goes,
    false_logprobs,
    false_rewards,
    false_version,
    false_logprobs_later,
    false_rewards_later,
)
HONEST_GROUPS = 12
MOST_LIES = {
    "false_logprobs": 4,
    "false_rewards": 4,
    "false_version": 8,
    "false_logprobs_later": 4,
    "false_rewards_later": 19 + 4,
}
"""What was stated before: the groups of a step for a lie from the start, which is found with the first one, and for
log-probs that the mismatch gate finds; 2 / share - 1 groups for other lies that begin later, and the rest of that step.
A wrong version shows when the policies differ by more than rounding, which takes a step or two."""
AFTER_ALL = ("false_version", "false_rewards_later")
