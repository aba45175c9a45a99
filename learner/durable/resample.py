"""Have steps sampled again whose answers are in the journal already, because their update cannot use them.

    journal   ... answers of steps 4, 5, 6 ... | void from step 5 | answers of steps 5, 6, 7 ...

A void takes back every answer before it of its step and of later ones, which may depend on it; what is recorded behind
it counts. Nothing is cut out of the journal, so a resumed run and a replay read the same, and a crash leaves either no
void or a whole one. A step that a checkpoint holds has been learned from, and is refused.
Left out on purpose: one order alone. The tasks of later steps may follow from all answers of a step.
"""

from pathlib import Path

from learner.durable.checkpoint import CheckpointStore
from learner.durable.journal import Journal
from learner.durable.recorder import index_records, pack_void
from learner.durable.repair_advice import repair_advice
from learner.orders.orders import step_of
from learner.update.mismatch import Mismatch
from protocol.errors import ProtocolError
from shared.errors import ConfigError, UserError
from shared.run.files import finish_writes
from shared.run.run_dir import RunDir


def sample_again(run: RunDir, store: CheckpointStore, step: int, last: int) -> int:
    """Void the answers of this step, counted from 1 as in every message, and of later ones; returns how many orders
    are to be answered again. The caller holds the run."""
    newest = store.load_latest()
    done = newest.step if newest else 0
    if not done < step <= last:
        raise ConfigError(
            f"--resample-step got {step}, but the newest checkpoint of {run.path} holds step {done} and the run ends"
            f" with step {last}; give a step from {done + 1} to {last}, or leave it out."
        )
    finish_writes(run.journal)
    with repair_advice(store):
        journal = Journal.open(run.journal)
    try:
        found = index_records(journal.reading().records())
        count = sum(step_of(order_id) >= step - 1 for order_id in found)
        if count:
            journal.append(pack_void(step - 1))
            journal.sync()
    finally:
        journal.close()
    return count


def way_back(path: Path, step: int) -> str:
    """What a user can type when the answers of a step are to blame."""
    return (
        "If an actor was at fault, repair or remove it and have the step sampled again:"
        f" `python -m launch resume {path} --resample-step {step}`."
    )


def with_way_back(error: BaseException, path: Path, step: int) -> BaseException:
    """The error of an update, with the way back in it: the gate's sentence, or a crash that the answers may have
    caused. Others have causes of their own."""
    if isinstance(error, Mismatch):
        return Mismatch(f"{error} {way_back(path, step)}")
    if isinstance(error, Exception) and not isinstance(error, UserError | ProtocolError | OSError):
        error.add_note(way_back(path, step))
    return error
