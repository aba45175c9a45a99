"""`replay`: apply a run's journal again, with no actor, and compare the adapter with the run's.

The learner's own loop, with answers from the journal and nothing written. It goes from step 0, or from the oldest
checkpoint that the journal still reaches back to (`journal.keep`). Ends with one JSON line; exit 0 only on a match.
What is compared is the newest checkpoint: that is as far as the run is certain to have gone.
"""

import json
import math
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from msgspec import structs

from learner.durable.checkpoint import Checkpoint, CheckpointStore
from learner.durable.journal import Journal
from learner.durable.journal_format import Start
from learner.durable.repair_advice import salvage_told
from shared.config.load import config_from_json
from shared.config.tree import Config
from shared.errors import DamageError, RunDirError
from shared.process.determinism import cpu_environment
from shared.run.run_dir import RunDir
from shared.run.summary import read_summary


def run_command(*, directory: Path) -> int:
    """Replay, print, compare."""
    run = RunDir.open(directory)
    config = config_from_json(run.config.read_bytes())
    store = CheckpointStore(run.checkpoints, config.checkpoint.keep)
    checkpoint = store.load_latest()
    if checkpoint is None:
        raise RunDirError(
            f"{directory} has no checkpoint yet to compare with; let it train {config.checkpoint.every} steps."
        )
    expected = json.loads(checkpoint.files["state.json"])["adapter_sha256"]
    summary = read_summary(run)
    if summary and summary.status == "done":
        expected = summary.adapter_sha256
    with salvage_told(store):
        journal = Journal.read(run.journal)
    first = first_state(store, journal.start, newest=checkpoint.step)
    from_step = first.step if first else 0
    print(f"replaying steps {from_step} to {checkpoint.step} of {directory}", file=sys.stderr)
    os.environ.update(cpu_environment(config.compute.learner_threads, config.compute.blas))
    found = replay(config, journal.records(), first, checkpoint.step)
    report = {
        "adapter_sha256": found,
        "match": found == expected,
        "from_step": from_step,
        "steps": checkpoint.step,
        "expected": expected,
    }
    print(json.dumps(report))
    return 0 if found == expected else 1


def first_state(store: CheckpointStore, start: Start, newest: int) -> Checkpoint | None:
    """The oldest state that the journal reaches back to; None if that is step 0."""
    if start.step == 0:
        return None
    if newest < start.step:
        raise DamageError(
            f"The journal begins with step {start.step}, and the newest whole checkpoint is of step {newest};"
            " there is nothing to replay until `resume` has come to a checkpoint behind that."
        )
    return store.load_oldest(start.step)


def replay(config: Config, records: Iterator[bytes], first: Checkpoint | None, steps: int) -> str:
    """The digest of the adapter after `steps` updates, those up to `first` taken from there."""
    from learner.durable.recorder import RecordedOrders
    from learner.loop import train
    from learner.reports.run_files import NoBooks
    from learner.reports.step_report import Ledger
    from learner.state import Past
    from learner.wiring import build_parts, build_state, load_model

    # A replay that goes another way is to end with "match": false, not at the gate for actors that go astray.
    config = structs.replace(config, loss=structs.replace(config.loss, max_mismatch=math.inf))
    # A checkpoint behind a fault says that the run went on without that batch, whatever its config says by now.
    config = structs.replace(config, guard=structs.replace(config.guard, on_fault="skip"))
    model = load_model(config)
    desk = RecordedOrders(records)
    state = build_state(model, desk)
    past = Past()
    if first:
        past = state.load(first)
        state.sampler.submit_pending()
    ledger = Ledger(config, NoBooks(), past, lambda: False, state.sampler.curriculum.metrics)
    with tempfile.TemporaryDirectory() as folder:
        train(build_parts(model, state, desk, ledger, Path(folder) / "lease"), first.step if first else 0, steps)
    return state.publisher.versions[steps].sha256
