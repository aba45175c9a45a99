"""What can be saved of a damaged journal, in words: the journal knows bytes, here they are steps."""

from collections.abc import Iterator
from contextlib import contextmanager

from learner.durable.checkpoint import CheckpointStore
from learner.durable.journal import JournalDamage
from learner.durable.recorder import index_records, read, step_of
from shared.errors import DamageError


@contextmanager
def repair_advice(checkpoints: CheckpointStore) -> Iterator[None]:
    """Add to the journal's sentence what is safe, and what giving up the rest would cost."""
    try:
        yield
    except JournalDamage as damage:
        raise DamageError(f"{damage} {what_is_safe(damage)} {what_it_costs(checkpoints)}") from damage


def what_is_safe(damage: JournalDamage) -> str:
    """Before and behind."""
    number = sum(len(segment.records) for segment in damage.whole)
    if number == 0:
        return f"It is the first record; {damage.num_behind} behind it in this file are whole."
    index = index_records(payload for segment in damage.whole for payload in segment.payloads())
    if not index:
        return f"The {number} records before it are whole; {damage.num_behind} behind it in this file are whole too."
    last = read(list(index.values())[-1])
    return (
        f"The {number} records before it are whole, up to order {last.order_id} of step {step_of(last.order_id) + 1};"
        f" {damage.num_behind} behind it in this file are whole too."
    )


def what_it_costs(checkpoints: CheckpointStore) -> str:
    """What training needs of a journal lies behind the newest checkpoint."""
    newest = checkpoints.load_latest()
    done = newest.step if newest else 0
    return (
        f"The newest checkpoint holds step {done}: once the file is cut, `resume` goes on from there and ends with the"
        " same adapter; `replay` needs the file whole."
    )
