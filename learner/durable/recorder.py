"""The journal as the dispatcher sees it: record filled orders, find them again, and delete old ones.

    record    one filled order or several that came together, each as the three frames that the actor sent, packed
              (protocol/codec.py)

An fsync takes as long for a hundred groups as for one, so what came together is one record and one fsync.
Who reads a journal learns where each order is, and reads the order itself when it is asked for: a long run's journal is
larger than the memory, and most of it lies before the checkpoint.
Only training orders are recorded; an evaluation can be repeated. A recorded order must match the one that is asked for:
the journal of another config is refused, not trained on. On a card, the size of a step is recorded too
(learner/update/budget.py), and where a run has several ranks, so is their number from a step on. A void record cancels
the records before it: of its step and of later steps (resample.py), or of some orders, whose actor was caught lying
(learner/orders/audited.py). Those of a step may depend on each other, so they are void by one record.

After a checkpoint the journal may shrink:

    journal.keep = "all"           nothing is deleted: `replay` starts at step 0
    journal.keep = "checkpoints"   deletes what is older than the newest `checkpoint.keep` checkpoints: `replay` starts
                                   at the oldest of them, and checkpoint.keep * checkpoint.every steps stay

Nothing is deleted while there are fewer checkpoints than that. The best checkpoint does not count, since it may be as
old as the run. A new segment begins at each checkpoint, so that segments can be deleted whole.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

from learner.durable.checkpoint import CheckpointStore
from learner.durable.journal import Journal, Place, Segment
from learner.orders.orders import NO_FRAMES, RECORD_BYTES, fills, step_of, training_step
from learner.update.budget import Size
from protocol.codec import decode, encode_again, field_in, frames_in, packed_parts, read_header, unpack
from protocol.errors import MalformedMessage, WrongVersion
from protocol.limits import NUM_FRAMES
from protocol.messages import FilledOrder, Group, Order
from shared.config.processes import JournalConfig
from shared.errors import DamageError

VOID = b"void from step "
VOID_ORDERS = b"void orders "
SIZE = b"size of step "
RANKS = b"ranks from step "


class Index:
    """What the records of a journal say, without what is void. Filled orders stay on disk until they are asked for."""

    def __init__(self, segments: Iterable[Segment], first_step: int = 0) -> None:
        """Orders of steps before `first_step` are left out."""
        self.first_step = first_step
        self.found: dict[str, Place] = {}
        """By order id. Of two records of one order the first counts."""
        self.sizes: dict[int, Size] = {}
        """By step. Of two records the last counts: the step was computed again after a crash, and could not be in the
        size of before."""
        self.ranks: dict[int, int] = {}
        """Their number, by the step from which on they compute; before the first one it is one."""
        self.last_steps = {segment.number: self.load_all(segment) for segment in segments}

    def load_all(self, segment: Segment) -> int:
        """Returns the latest step that it has a record of; -1 if it has none."""
        records = zip(segment.records, segment.payloads(), strict=True)
        return max((self.load(payload, segment.path, record.start) for record, payload in records), default=-1)

    def load(self, payload: bytes, path: Path, start: int) -> int:
        """Remember a record, which starts there; returns its step, or -1 for a void."""
        if (voided := voided_from(payload)) is not None:
            self.found = before(self.found, voided)
            self.sizes = {step: size for step, size in self.sizes.items() if step < voided}
            return -1
        if cancelled := voided_orders(payload):
            self.found = without(self.found, cancelled)
            return -1
        if noted := size_from(payload):
            self.sizes |= noted
            return max(noted)
        if changed := ranks_from(payload):
            self.ranks = from_now_on(self.ranks, changed)
            return -1
        parts = parts_in(payload)
        for order_id, part in parts.items():
            if step_of(order_id) >= self.first_step:
                self.found.setdefault(order_id, Place(path=path, start=start + part.start, end=start + part.stop))
        return max(map(step_of, parts))

    def find(self, order: Order) -> FilledOrder | None:
        """Each record is returned once. It is read here, not with the journal, to save memory."""
        place = self.found.pop(order.order_id, None)
        return None if place is None else matching(order, read_at(place))

    def size_of(self, step: int) -> Size | None:
        return self.sizes.get(step)


class JournalRecorder(Index):
    """Records filled orders in a journal on disk, and finds those of earlier starts of the run."""

    def __init__(self, journal: Journal, first_step: int, admit: Callable[[Group], object]) -> None:
        """Steps before `first_step` are in a checkpoint.

        admit: raises for a group that must stop the run. Its order is not recorded, so that a resumed run orders it
        again once the cause is fixed.
        """
        super().__init__(journal.reading().segments, first_step)
        self.journal = journal
        self.admit = admit
        self.durable = set(self.found)
        self.written: set[str] = set()
        """Orders that a sync has or may have made durable since the last `record`."""

    def record(self, filled: Sequence[FilledOrder], frames: Mapping[str, Sequence[bytes]] = NO_FRAMES) -> None:
        """Those before one that is not admitted are recorded too."""
        try:
            self.commit(filled, frames, self.journal.sync)
        finally:
            self.journal.end_sync()
            self.durable.update(self.written)
            self.written.clear()

    def begin(self, filled: Sequence[FilledOrder], frames: Mapping[str, Sequence[bytes]]) -> None:
        self.commit(filled, frames, self.journal.begin_sync)

    def commit(
        self, filled: Sequence[FilledOrder], frames: Mapping[str, Sequence[bytes]], sync: Callable[[], None]
    ) -> None:
        """One fsync per record: recovery can tell one torn last record from damage, but not two of them."""
        admitted: list[FilledOrder] = []
        try:
            for one in filled:
                if training_step(one.order_id) is not None:
                    for group in one.groups:
                        self.admit(group)
                    admitted.append(one)
        finally:
            for record in records_of(admitted, frames):
                self.journal.append(*chain.from_iterable(record.values()))
                self.last_steps[self.journal.tail] = max(*map(step_of, record), self.last_step(self.journal.tail))
                sync()
                self.written.update(record)

    def void(self, order_ids: Iterable[str]) -> None:
        """Cancel the records of these orders, which will be filled and recorded again."""
        if recorded := [order_id for order_id in order_ids if order_id in self.durable]:
            self.journal.append(VOID_ORDERS + " ".join(recorded).encode())
            self.journal.sync()
            self.durable.difference_update(recorded)

    def note_size(self, step: int, size: Size) -> None:
        """Unless it is what the journal says already: the step was computed before."""
        if self.sizes.get(step) != size:
            self.journal.append(pack_size(step, size))
            self.journal.sync()
            self.last_steps[self.journal.tail] = max(step, self.last_step(self.journal.tail))
            self.sizes[step] = size

    def note_ranks(self, ranks: int) -> None:
        """Of the steps that follow, unless the journal says it already. One rank from the start on is not noted."""
        if ranks_at(self.ranks, self.first_step) != ranks or max(self.ranks, default=0) > self.first_step:
            self.append_ranks({self.first_step: ranks})

    def append_ranks(self, changed: dict[int, int]) -> None:
        """As one record: a kill between two of them would lose the later changes."""
        self.journal.append(pack_ranks(changed))
        self.journal.sync()
        self.ranks = from_now_on(self.ranks, changed)

    def is_durable(self, order_id: str) -> bool:
        """Decided by the id alone, so the result does not depend on what is ordered now."""
        step = training_step(order_id)
        return step is None or step < self.first_step or order_id in self.durable

    def checkpointed(self, step: int) -> None:
        """A checkpoint covers all earlier steps, so their order ids can be forgotten."""
        self.first_step = max(self.first_step, step)
        self.durable = {order_id for order_id in self.durable if step_of(order_id) >= step}
        self.sizes = {noted: size for noted, size in self.sizes.items() if noted >= step}

    def last_step(self, segment: int) -> int:
        """The latest step that a segment has a record of; -1 if it is empty."""
        return self.last_steps.get(segment, -1)

    def forget_before(self, step: int) -> None:
        """Delete the oldest segments, up to the first one with a record of this step or a later one."""
        self.journal.begin_segment()
        if self.ranks:
            # Before their records are deleted with a segment.
            later = {since: ranks for since, ranks in self.ranks.items() if since > step}
            self.append_ranks({step: ranks_at(self.ranks, step)} | later)
        oldest, tail = min(self.journal.firsts), self.journal.tail
        needed = (segment for segment in range(oldest, tail) if self.last_step(segment) >= step)
        first = next(needed, tail)
        if first > oldest:
            self.journal.drop_before(first, step)
            self.last_steps = {segment: last for segment, last in self.last_steps.items() if segment >= first}


class RecordedOrders(Index):
    """Stands in for the dispatcher in a replay: every order is filled from the journal, and no actor is needed."""

    def __init__(self, segments: Iterable[Segment]) -> None:
        super().__init__(segments)
        self.filled: dict[str, FilledOrder] = {}
        self.resized: list[int] = []
        """Steps that were computed in another size than in the run, because memory ran out."""

    def publish(self, policy: object, oldest_needed: int) -> None:
        """There is no actor to send it to."""

    def submit(self, orders: Iterable[Order]) -> None:
        """An order without a record is left out: the run ended before it was filled."""
        for order in orders:
            if filled := self.find(order):
                self.filled[order.order_id] = filled

    def collect(self, order_ids: Sequence[str]) -> list[FilledOrder]:
        for order_id in order_ids:
            if order_id not in self.filled:
                raise DamageError(f"The journal has no filled order {order_id}; it was not written by this config.")
        return [self.filled.pop(order_id) for order_id in order_ids]

    def note_size(self, step: int, size: Size) -> None:
        """Compared with that of the run; nothing is written."""
        if size != self.sizes.get(step):
            self.resized.append(step)

    def pump(self, timeout_s: float = 0.0) -> None:
        """There is no link to serve."""


def from_now_on(known: dict[int, int], changed: dict[int, int]) -> dict[int, int]:
    """A start of the run computes its steps again, so what was said of them before no longer counts."""
    since = min(changed, default=math.inf)
    return {step: ranks for step, ranks in known.items() if step < since} | changed


def ranks_at(known: dict[int, int], step: int) -> int:
    return known[max(since for since in known if since <= step)] if min(known, default=math.inf) <= step else 1


def before(found: dict[str, Place], step: int) -> dict[str, Place]:
    return {order_id: place for order_id, place in found.items() if step_of(order_id) < step}


def without(found: dict[str, Place], order_ids: frozenset[str]) -> dict[str, Place]:
    return {order_id: place for order_id, place in found.items() if order_id not in order_ids}


def pack_void(step: int) -> bytes:
    """The record that voids this step (from 0) and later ones."""
    return VOID + str(step).encode()


def voided_from(payload: bytes) -> int | None:
    """The step of a void; None for another record. The first bytes of a filled order are a small length."""
    return int(payload.removeprefix(VOID)) if payload.startswith(VOID) else None


def voided_orders(payload: bytes) -> frozenset[str]:
    """The orders that a void cancels; empty for another record."""
    return frozenset(payload.removeprefix(VOID_ORDERS).decode().split() if payload.startswith(VOID_ORDERS) else ())


def pack_size(step: int, size: Size) -> bytes:
    """The record of the size in which a step (from 0) was computed."""
    return SIZE + b"%d %d %d" % (step, size.tokens, size.rows)


def size_from(payload: bytes) -> dict[int, Size]:
    """The step and its size; empty for another record."""
    if not payload.startswith(SIZE):
        return {}
    step, tokens, rows = map(int, payload.removeprefix(SIZE).split())
    return {step: Size(tokens=tokens, rows=rows)}


def pack_ranks(changed: Mapping[int, int]) -> bytes:
    """The record of how many ranks compute, by the step (from 0) from which on they do."""
    return RANKS + b" ".join(b"%d %d" % one for one in sorted(changed.items()))


def ranks_from(payload: bytes) -> dict[int, int]:
    """Their number by step; empty for another record."""
    if not payload.startswith(RANKS):
        return {}
    numbers = list(map(int, payload.removeprefix(RANKS).split()))
    return dict(zip(numbers[::2], numbers[1::2], strict=True))


def records_of(
    filled: Iterable[FilledOrder], frames: Mapping[str, Sequence[bytes]]
) -> Iterator[dict[str, list[bytes]]]:
    """Order id -> parts of the packed order, of each record."""
    record: dict[str, list[bytes]] = {}
    size = 0
    for one in filled:
        # The bytes that came were decoded, and so checked. What the learner has made itself has none.
        record[one.order_id] = packed_parts(frames.get(one.order_id) or encode_again(one))
        size += sum(map(len, record[one.order_id]))
        if size >= RECORD_BYTES:
            yield record
            record, size = {}, 0
    if record:
        yield record


def orders_in(payload: bytes) -> dict[str, bytes]:
    """The inverse: order id -> packed order."""
    return {order_id: payload[part] for order_id, part in parts_in(payload).items()}


def parts_in(payload: bytes) -> dict[str, slice]:
    """Order id -> where the packed order is. Only the id is decoded: the journal has checked the bytes, and most orders
    are not asked for."""
    frames = frames_in(payload)
    parts: dict[str, slice] = {}
    start = 0
    for first in range(0, len(frames), NUM_FRAMES):
        check_release(payload[frames[first]])
        _, body, buffers = frames[first : first + NUM_FRAMES]
        parts[str(field_in(payload[body], "order_id"))] = slice(start, buffers.stop)
        start = buffers.stop
    return parts


def check_release(header: bytes) -> None:
    try:
        read_header(header)
    except WrongVersion as error:
        raise DamageError(
            f"The journal is of another release; go on with the one that began this run, or start a new one. ({error})"
        ) from error


def read_at(place: Place) -> FilledOrder:
    """The message has a checksum of its own, which shows a change since the journal was checked."""
    try:
        return read(place.read())
    except (OSError, MalformedMessage) as error:
        raise DamageError(
            f"{place.path} was whole when it was checked, and now the order at byte {place.start} cannot be read"
            f" ({error}); let nothing else change the run, and start this command again, which checks all of it."
        ) from error


def read(packed: bytes) -> FilledOrder:
    message = decode(unpack(packed))
    assert isinstance(message, FilledOrder)
    return message


def matching(order: Order, filled: FilledOrder) -> FilledOrder:
    """The recorded order; DamageError if it was filled for another policy or other tasks."""
    if filled.policy_version != order.policy_version or not fills(order, filled.groups):
        raise DamageError(
            f"The journal's record of order {order.order_id} does not fit this run's config and tasks;"
            " restore config.json, have the step sampled again"
            f" (`resume --resample-step {step_of(order.order_id) + 1}`), or start a new run."
        )
    return filled


class Compaction:
    """Deletes what the journal need not keep."""

    def __init__(self, config: JournalConfig, checkpoints: CheckpointStore, recorder: JournalRecorder) -> None:
        self.config = config
        self.checkpoints = checkpoints
        self.recorder = recorder

    def after_checkpoint(self, step: int) -> None:
        """Call this once the checkpoint of this step is durable."""
        self.recorder.checkpointed(step)
        if self.config.keep == "checkpoints":
            self.recorder.forget_before(self.checkpoints.oldest_kept(step))
