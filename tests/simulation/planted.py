"""Bugs put in on purpose: each replaces one part of the protocol, and the simulation must find it.

They are subclasses because a bug is the real part with one thing wrong.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, cast

import msgspec

from actor.installer import Installer
from actor.link import Link
from actor.rollout import Rollout
from learner.durable.checkpoint import UnsavedCheckpoint
from learner.durable.recorder import JournalRecorder, voided_from
from learner.durable.state import LearnerState, RunTotals
from learner.orders.arrived import Arrived
from learner.orders.dispatch import Dispatcher
from learner.orders.orders import NO_FRAMES
from learner.orders.peers import Peer
from learner.orders.plan import Pending, StepPlan
from learner.reports.run_files import RunFiles
from protocol.codec import encode, pack
from protocol.messages import Ack, FilledOrder, Hello, Order, Policy
from tests.simulation.build import Build


class AckBeforeFsync(Dispatcher):
    """Tells the actor first and writes afterwards."""

    def accept(self, arrived: Arrived) -> None:
        for one in arrived.all:
            self.send(one.peer.address, Ack(order_id=one.filled.order_id))
        super().accept(arrived)


class NoDedup(Dispatcher):
    """Takes a filled order that it has already as a new one."""

    def wanted(self, peer: Peer, filled: FilledOrder) -> bool:
        self.orders.setdefault(filled.order_id, cast(Order, filled))
        return True


class NoFsync(JournalRecorder):
    """Appends, and leaves the rest to the kernel."""

    def record(self, filled: Sequence[FilledOrder], frames: Mapping[str, Sequence[bytes]] = NO_FRAMES) -> None:
        for filled_order in filled:
            for group in filled_order.groups:
                self.admit(group)
            self.journal.append(pack(encode(filled_order)))
            self.durable.add(filled_order.order_id)


class OneFsyncLate(JournalRecorder):
    """Syncs what came before, and the last record with the next delivery."""

    def record(self, filled: Sequence[FilledOrder], frames: Mapping[str, Sequence[bytes]] = NO_FRAMES) -> None:
        for filled_order in filled:
            self.journal.sync()
            self.journal.append(pack(encode(filled_order)))
            self.durable.add(filled_order.order_id)


class ForgetsTheJournal(JournalRecorder):
    """Does not look for filled orders of an earlier start."""

    def find(self, order: Order) -> FilledOrder | None:
        return None


class VoidsIgnored(JournalRecorder):
    """Finds filled orders that were voided."""

    def load(self, payload: bytes, path: Path, start: int) -> int:
        return -1 if voided_from(payload) is not None else super().load(payload, path, start)


class SeedsByTime(StepPlan):
    """Draws an order's seeds when it is made, not from its name."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.drawn = count()

    def orders(self, pending: Pending, first_slot: int) -> list[Order]:
        return [self.reseeded(order) for order in super().orders(pending, first_slot)]

    def reseeded(self, order: Order) -> Order:
        """Other seeds each time."""
        groups = (msgspec.structs.replace(g, seeds=tuple(next(self.drawn) for _ in g.seeds)) for g in order.groups)
        return msgspec.structs.replace(order, groups=tuple(groups))


class NeverRepeats(Dispatcher):
    """The orders of a lost actor are not ordered again."""

    def requeue(self, order_ids: Sequence[str]) -> None:
        pass


class RepeatedThoughGiven(Dispatcher):
    """The orders of a lost actor are ordered again though another actor has the late order too."""

    def requeue(self, order_ids: Sequence[str]) -> None:
        self.queue.extendleft(reversed(order_ids))


class ByArrival(Dispatcher):
    """Hands the filled orders of a step over in the order in which they came."""

    def collect(self, order_ids: Sequence[str]) -> list[FilledOrder]:
        arrived = [order_id for order_id in self.filled if order_id in order_ids]
        while len(arrived) < len(order_ids):
            self.pump(self.welcome.heartbeat_s / 2)
            arrived = [order_id for order_id in self.filled if order_id in order_ids]
        return [self.filled.pop(order_id) for order_id in arrived]


class CheckpointBeforeJournal(JournalRecorder):
    """Counts on the next checkpoint to hold what it was told, and writes the journal only every third time."""

    waiting: tuple[FilledOrder, ...] = ()

    def record(self, filled: Sequence[FilledOrder], frames: Mapping[str, Sequence[bytes]] = NO_FRAMES) -> None:
        self.waiting += tuple(filled)
        self.durable.update(filled_order.order_id for filled_order in filled)
        if len(self.waiting) >= 3:
            super().record(self.waiting)
            self.waiting = ()


class PendingNotSaved(LearnerState):
    """A checkpoint without the orders that are out."""

    def to_save(self, step: int, totals: RunTotals) -> UnsavedCheckpoint:
        pending, self.plan.pending = self.plan.pending, []
        try:
            return super().to_save(step, totals)
        finally:
            self.plan.pending = pending


class CreditLeak(Dispatcher):
    """A filled order keeps its credit."""

    def settle(self, peer: Peer, order_id: str) -> None:
        self.send(peer.address, Ack(order_id=order_id))


class CreditsIgnored(Dispatcher):
    """Gives every order to the first peer."""

    def send_queued(self) -> None:
        peers = list(self.peers.by_address.values())
        while self.queue and peers:
            order_id = self.queue.popleft()
            if order_id in self.orders:
                self.give(peers[0], self.orders[order_id])


class StaleAfterReconnect(Link):
    """Takes the policy it has where the one that an order names is missing."""

    def queue_order(self, order: Order) -> None:
        if order.policy_version not in self.policies and self.policies:
            self.policies[order.policy_version] = self.policies[max(self.policies)]
        super().queue_order(order)


class NewestPolicy(Link):
    """Samples from what came last, not from what the order names."""

    def next_order(self) -> tuple[Order, Policy] | None:
        found = super().next_order()
        return found and (found[0], self.policies[max(self.policies)])


class WaitsForEver(Link):
    """Never asks the learner for a policy that no other actor passes on."""

    def stop_awaiting(self) -> None:
        pass


class InstallsOnce(Installer):
    """Takes a version's number for its bytes: what a new policy brings under an old number stays out."""

    def load(self, policy: Policy) -> None:
        if not self.installed:
            super().load(policy)
        self.installed = policy.sha256


class RolloutThatInstallsOnce(Rollout):
    """With that installer."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.installer = InstallsOnce(self.engine)


class HelloIgnored(Dispatcher):
    """Greets an actor once; a second Hello gets no reply."""

    def greet(self, address: bytes, hello: Hello) -> None:
        if address not in self.peers.by_address:
            super().greet(address, hello)


class PolicyNotRepeated(Dispatcher):
    """Thinks that an actor who says Hello again still has what it was sent."""

    def greet(self, address: bytes, hello: Hello) -> None:
        known = self.peers.by_address.get(address)
        super().greet(address, msgspec.structs.replace(hello, version=known.version) if known else hello)


class PolicyRepeated(Dispatcher):
    """Thinks that an actor who says Hello again has read nothing, and sends all of it again."""

    def greet(self, address: bytes, hello: Hello) -> None:
        known = self.peers.by_address.get(address)
        if known:
            known.version, known.mark, known.marked = None, 1, True
        super().greet(address, msgspec.structs.replace(hello, mark=1, version=None) if known else hello)


class RowsNotSynced(RunFiles):
    """Leaves the rows of steps that a checkpoint holds to the kernel."""

    def checkpoint(self, step: int, totals: RunTotals) -> None:
        self.checkpoints.save(self.state.to_save(step, totals))
        self.compaction.after_checkpoint(step)


class RowsTwice(RunFiles):
    """Leaves the rows of steps that are done again."""

    def resume_at(self, step: int) -> None:
        pass


@dataclass(frozen=True, kw_only=True)
class Planted:
    """A bug and what it breaks."""

    build: Build
    """The real parts but one."""
    breaks: frozenset[str]
    """The invariants by which it may be found."""


def planted(*breaks: str, **part: Any) -> Planted:
    """One part replaced."""
    return Planted(build=Build(**part), breaks=frozenset(breaks))


PLANTED = {
    "ack before fsync": planted("acked durable", dispatcher=AckBeforeFsync),
    "no dedup": planted("exactly once", dispatcher=NoDedup),
    "append without fsync": planted("acked durable", recorder=NoFsync),
    "fsync one record late": planted("acked durable", recorder=OneFsyncLate),
    "dedup forgotten after a restart": planted("acked kept", "exactly once", recorder=ForgetsTheJournal),
    "voids ignored": planted("liveness", recorder=VoidsIgnored),
    "seeds not from the group's name": planted("final value", "exactly once", plan=SeedsByTime),
    "orders not repeated": planted("liveness", dispatcher=NeverRepeats),
    "repeated though given": planted("credits", dispatcher=RepeatedThoughGiven),
    "consumed in order of arrival": planted("exactly once", dispatcher=ByArrival),
    "checkpoint instead of journal": planted("acked durable", recorder=CheckpointBeforeJournal),
    "pending orders not saved": planted("no error", state=PendingNotSaved),
    "credit leak": planted("credits", dispatcher=CreditLeak),
    "credits ignored": planted("credits", dispatcher=CreditsIgnored),
    "stale policy after a reconnect": planted("policy version", link=StaleAfterReconnect),
    "newest policy instead of the one ordered": planted("policy version", link=NewestPolicy),
    "policy awaited for ever": planted("liveness", link=WaitsForEver),
    "adapter installed once": planted("policy version", rollout=RolloutThatInstallsOnce),
    "no reply to a second hello": planted("credits", "liveness", dispatcher=HelloIgnored),
    "policy not repeated": planted("liveness", dispatcher=PolicyNotRepeated),
    "policy repeated while under way": planted("memory", "credits", dispatcher=PolicyRepeated),
    "rows not synced before a checkpoint": planted("metrics", files=RowsNotSynced),
    "rows of repeated steps kept": planted("metrics", files=RowsTwice),
}
