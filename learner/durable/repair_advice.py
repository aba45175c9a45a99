"""What a damaged journal still has, and what cutting it would cost.

The journal counts bytes and records; this module says the same in orders and steps, for the user who must decide.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from learner.durable.checkpoint import CheckpointStore
from learner.durable.journal import JournalDamage
from learner.durable.recorder import Index
from learner.orders.orders import step_of
from shared.errors import DamageError


@contextmanager
def repair_advice(checkpoints: CheckpointStore) -> Iterator[None]:
    """Add to a JournalDamage which records are whole, and what is lost if the rest is cut off."""
    try:
        yield
    except JournalDamage as damage:
        raise DamageError(f"{damage} {whole_records(damage)} {cost_of_cutting(checkpoints)}") from damage


def whole_records(damage: JournalDamage) -> str:
    number = sum(len(segment.records) for segment in damage.whole)
    if number == 0:
        return f"It is the first record; {damage.num_behind} behind it in this file are whole."
    found = Index(damage.whole).found
    if not found:
        return f"The {number} records before it are whole; {damage.num_behind} behind it in this file are whole too."
    last = next(reversed(found))
    return (
        f"The {number} records before it are whole, up to order {last} of step {step_of(last) + 1};"
        f" {damage.num_behind} behind it in this file are whole too."
    )


def cost_of_cutting(checkpoints: CheckpointStore) -> str:
    """Training needs only the part of the journal after the newest checkpoint."""
    newest = checkpoints.load_latest()
    done = newest.step if newest else 0
    return (
        f"The newest checkpoint is of step {done}: once the file is cut, `resume` goes on from there and ends with the"
        " same adapter; `replay` needs the file whole."
    )
