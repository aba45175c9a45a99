"""`replay`: apply a run's journal again, from step 0, with no actor, and compare the adapter with the run's.

The learner's own loop, with answers from the journal and nothing written. Ends with one JSON line; exit 0 only on a
match. What is compared is the newest checkpoint: that is as far as the run is certain to have gone.
"""

import json
import math
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from msgspec import structs

from launch.results import read_summary
from learner.checkpoint import CheckpointStore
from learner.journal import Journal
from shared.config import Config
from shared.config_load import config_from_json
from shared.determinism import cpu_environment
from shared.errors import RunDirError
from shared.run_dir import RunDir


def run_command(*, directory: Path) -> int:
    """Replay, print, compare."""
    run = RunDir.open(directory)
    config = config_from_json(run.config.read_bytes())
    checkpoint = CheckpointStore(run.checkpoints, config.checkpoint.keep).load_latest()
    if checkpoint is None:
        raise RunDirError(
            f"{directory} has no checkpoint yet to compare with; let it train {config.checkpoint.every} steps."
        )
    expected = json.loads(checkpoint.files["state.json"])["adapter_sha256"]
    summary = read_summary(run)
    if summary and summary.status == "done":
        expected = summary.adapter_sha256
    print(f"replaying {checkpoint.step} steps of {directory}", file=sys.stderr)
    os.environ.update(cpu_environment(config.compute.learner_threads, config.compute.blas))
    found = replay(config, Journal.read(run.journal).records(), checkpoint.step)
    report = {"adapter_sha256": found, "match": found == expected, "steps": checkpoint.step, "expected": expected}
    print(json.dumps(report))
    return 0 if found == expected else 1


def replay(config: Config, records: Iterator[bytes], steps: int) -> str:
    """The digest of the adapter after `steps` updates."""
    from learner.books import NoBooks
    from learner.ledger import Ledger
    from learner.loop import train
    from learner.recorder import RecordedOrders
    from learner.wiring import build_parts, build_state, load_model

    # A replay that goes another way is to end with "match": false, not at the gate for actors that go astray.
    config = structs.replace(config, loss=structs.replace(config.loss, max_mismatch=math.inf))
    model = load_model(config)
    desk = RecordedOrders(records)
    state = build_state(model, desk)
    ledger = Ledger(config, NoBooks(), spent_s=0.0, stop=lambda: False)
    with tempfile.TemporaryDirectory() as folder:
        train(build_parts(model, state, desk, ledger, Path(folder) / "lease"), first_step=0, last_step=steps)
    return state.publisher.versions[steps].sha256
