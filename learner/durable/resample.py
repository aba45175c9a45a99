"""Has steps sampled again although they are in the journal, because their update cannot use what was sampled.

    journal   ... orders of steps 4, 5, 6 ... | void from step 5 | orders of steps 5, 6, 7 ...

A void cancels every record before it of its step and of later steps, which may depend on it; records after it count.
Nothing is removed from the journal, so a resumed run and a replay read the same, and a crash leaves either no void or a
complete one. A step that is in a checkpoint was already learned from, so it is refused.
Single orders are voided by an audit only (orders/audited.py), before their step is used: the tasks of later steps may
depend on all groups of a step.
"""

import shlex
from pathlib import Path

from learner.durable.checkpoint import CheckpointStore
from learner.durable.journal import Journal
from learner.durable.recorder import Index, pack_void
from learner.durable.repair_advice import repair_advice
from learner.update.mismatch import Mismatch
from protocol.errors import ProtocolError
from shared.errors import ConfigError, UserError
from shared.run.files import finish_writes
from shared.run.run_dir import RunDir


def sample_again(run: RunDir, store: CheckpointStore, step: int, last: int) -> int:
    """Void this step and later ones; returns how many orders will be sampled again.

    step: counted from 1, as in every message. The caller must have locked the run.
    """
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
        count = len(Index(journal.reading().segments, step - 1).found)
        if count:
            journal.append(pack_void(step - 1))
            journal.sync()
    finally:
        journal.close()
    return count


def way_back(path: Path, step: int) -> str:
    """The command to try if an actor caused the error."""
    return (
        "If an actor was at fault, repair or remove it and have the step sampled again:"
        f" `python -m launch resume {shlex.quote(str(path))} --resample-step {step}`."
    )


def with_way_back(error: BaseException, path: Path, step: int) -> BaseException:
    """Add the command to the error of an update that bad samples may have caused: a mismatch, or an unknown crash."""
    if isinstance(error, Mismatch):
        return Mismatch(f"{error} {way_back(path, step)}")
    if isinstance(error, Exception) and not isinstance(error, UserError | ProtocolError | OSError):
        error.add_note(way_back(path, step))
    return error
