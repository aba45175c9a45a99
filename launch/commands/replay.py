"""`replay`: train on a run's journal again, without an actor, and compare the adapter with that of the run.

This is the learner's own loop with groups from the journal; it writes nothing. Several ranks are computed one after the
other, with the bits of as many processes as each step had. It starts from step 0, or from the
oldest checkpoint that the journal still reaches back to (`journal.keep`), and ends with the newest checkpoint: no
later step is certain to have been trained. The last line is JSON; the exit code is 0 only if the adapters match.
Steps are cut into the micro-batches of the run. If they do not fit into the memory of this card, they are cut smaller,
the last bits may differ, and the steps are named.

`replay --batch FILE` repeats one quarantined update in this process, on the CPU. It prints the loss and the gradient
of each sample, and where the suspect's numbers first go wrong. The last line is JSON; the exit code is 0 if the same
kind of fault appears again.
"""

import json
import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import structs

from launch.commands.open_run import open_run, pin_cpu
from learner.durable.checkpoint import Checkpoint, CheckpointStore
from learner.durable.find_adapter import adapters_of
from learner.durable.journal import Journal, Segment
from learner.durable.journal_format import Start
from learner.durable.repair_advice import repair_advice
from shared.config.load import config_from_json
from shared.config.tree import Config
from shared.errors import DamageError, RunDirError
from shared.run.metrics import finite
from shared.run.run_dir import RunDir
from shared.run.summary import Summary, read_summary

if TYPE_CHECKING:
    from learner.quarantine.quarantine import KeptBatch
    from learner.quarantine.reproduce import Reproduction
    from learner.tasks.tasks import TaskSet
    from shared.model.given_adapter import GivenAdapters


def replay_run(*, directory: Path) -> int:
    run, config = open_run(directory, compute_as="learner")
    store = CheckpointStore(run.checkpoints, config.checkpoint.keep)
    checkpoint = store.load_latest()
    if checkpoint is None:
        raise RunDirError(
            f"{directory} has no checkpoint to compare with yet; let it train {config.checkpoint.every} steps."
        )
    expected = expected_digest(checkpoint, read_summary(run))
    with repair_advice(store):
        journal = Journal.read(run.journal)
    first = first_state(store, journal.start, newest=checkpoint.step)
    from_step = first.step if first else 0
    given = adapters_of(run, config.lora.start_from, config.teacher.adapter)
    print(f"replaying steps {from_step} to {checkpoint.step} of {directory}", file=sys.stderr)
    check = partial(check_tasks, run)
    found, resized = replay(config, journal.segments, first, checkpoint.step, given, check)
    if resized:
        print(
            f"memory ran out in {len(resized)} of these steps, first in step {resized[0] + 1}: they were computed in"
            " smaller parts than in the run, so the last bits may differ; replay on a card with as much free memory",
            file=sys.stderr,
        )
    report = {
        "adapter_sha256": found,
        "match": found == expected,
        "from_step": from_step,
        "steps": checkpoint.step,
        "expected": expected,
        "resized": [step + 1 for step in resized],
    }
    print(json.dumps(report))
    return 0 if found == expected else 1


def expected_digest(checkpoint: Checkpoint, summary: Summary | None) -> str:
    """Of the adapter after this checkpoint's step. The summary has that of the run's last step only, and a damaged
    checkpoint may have been passed over."""
    if summary and summary.status == "done" and summary.steps == checkpoint.step:
        return summary.adapter_sha256
    return json.loads(checkpoint.files["state.json"])["adapter_sha256"]


def first_state(store: CheckpointStore, start: Start, newest: int) -> Checkpoint | None:
    """The oldest checkpoint from which the journal is complete; None if it is complete from step 0."""
    if start.step == 0:
        return None
    if newest < start.step:
        raise DamageError(
            f"The journal begins with step {start.step}, and the newest whole checkpoint is of step {newest}, so there"
            " is nothing to replay; let `resume` train until the next checkpoint."
        )
    return store.load_oldest(start.step)


def replay(
    config: Config,
    segments: Iterable[Segment],
    first: Checkpoint | None,
    steps: int,
    given: "GivenAdapters | None" = None,
    check: "Callable[[TaskSet], None]" = lambda tasks: None,
) -> tuple[str, list[int]]:
    """The digest of the adapter after `steps` updates, those up to `first` taken from there; the steps, from 0, that
    were computed in another size than in the run. given: the adapters that the run was given. check: raises for tasks
    that are not those of the run."""
    from learner.durable.recorder import RecordedOrders, ranks_at
    from learner.durable.state import RunTotals
    from learner.loop import train
    from learner.quarantine.quarantine import keep_nowhere
    from learner.reports.run_files import NoFiles
    from learner.reports.step_report import StepReport
    from learner.update.placement.placement import ALONE, InTurns
    from learner.wiring import build_learner, load_model
    from shared.process.lease import NoLease

    # A replay that goes another way must end with "match": false, not at the mismatch gate.
    config = structs.replace(config, loss=structs.replace(config.loss, max_mismatch=math.inf))
    # A checkpoint behind a fault says that the run went on without that batch, even if its config now says otherwise.
    config = structs.replace(config, guard=structs.replace(config.guard, on_fault="skip"))
    model = load_model(config, given) if given else load_model(config)
    check(model.tasks)
    filler = RecordedOrders(segments)
    ranks = InTurns([*model.policy.adapter.parameters().values()])
    learner = build_learner(model, filler, keep_nowhere, notes=filler, placement=ranks if filler.ranks else ALONE)
    state = learner.state
    totals = RunTotals()
    if first:
        totals = state.load(first)
        state.plan.submit_pending()
    report = StepReport(config, NoFiles(), totals, lambda: False, state.plan.curriculum.metrics)
    parts = learner.parts(report, NoLease())
    for start, end in stretches(filler.ranks, first.step if first else 0, steps):
        ranks.ranks = ranks_at(filler.ranks, start)
        train(parts, start, end)
    return state.publisher.versions[steps].sha256, filler.resized


def check_tasks(run: RunDir, tasks: "TaskSet") -> None:
    from learner.durable.state import refuse_other_tasks

    refuse_other_tasks(run, tasks.digests())


def stretches(changes: Iterable[int], first: int, last: int) -> list[tuple[int, int]]:
    """The steps from first to last, cut at these."""
    cuts = [first, *sorted(step for step in changes if first < step < last), last]
    return [*pairwise(cuts)]


def replay_batch(*, file: Path) -> int:
    from learner.quarantine.quarantine import read_batch

    kept = read_batch(file)
    config = config_from_json(kept.config)
    pin_cpu(config.compute, "learner")
    print(f"step {kept.step + 1} stopped because {kept.what}; suspect {kept.sample}", file=sys.stderr)

    from learner.orders.plan import judge_of
    from learner.quarantine.reproduce import reproduce
    from learner.tasks.tasks import load_tasks
    from learner.wiring import build_trainer, load_trained_policy, teacher_of
    from shared.base.cache import cached_base
    from shared.model.prompt import load_prompter

    if config.loss.kind == "opd":
        # What it followed is in the run beside the file: adapters, and the data behind the prompts.
        given = adapters_of(run_of(file), config.lora.start_from, config.teacher.adapter)
        prompter = load_prompter(cached_base(config.model).folder, config.environment)
        tasks = load_tasks(config.tasks, prompter, config.verifier.kind)
        check_tasks(run_of(file), tasks)
        teacher = teacher_of(config, prompter, tasks.train, given.teacher)
        policy = load_trained_policy(config, "cpu", given.start)
    else:
        policy, teacher = load_trained_policy(config, "cpu"), None
    trainer = build_trainer(policy, config, lambda: None, teacher=teacher)
    found = reproduce(kept, judge_of(config), trainer.batches, trainer.update)
    print("\n".join(sample_lines(kept, found)))
    report = batch_report(kept, found)
    print(json.dumps(report))
    return 0 if report["reproduced"] else 1


def run_of(file: Path) -> RunDir:
    """The run in whose quarantine/ the file is."""
    return RunDir(file.resolve().parents[1])


def sample_lines(kept: "KeptBatch", found: "Reproduction") -> list[str]:
    """One line for each sample, one for the first bad tensor, one for the fault."""
    scores = {
        f"{group.group_id}[{index}]": score
        for order in kept.filled
        for group in order.groups
        for index, score in enumerate(group.scores)
    }
    alone = {finding.sample: finding for finding in found.findings}
    lines = [f"{'sample':<28} {'tokens':>6} {'score':>8} {'advantage':>10} {'loss':>12} {'grad norm':>12}"]
    for entry in found.batch.used:
        name, finding = entry.sample.name, alone[entry.sample.name]
        suspected = "  <-- suspect" if found.fault and name == found.fault.suspect.sample else ""
        lines.append(
            f"{name:<28} {len(entry.selected):>6} {scores[name]:>8.4g} {entry.sample.advantage:>10.4g}"
            f" {finding.loss:>12.4g} {finding.grad_norm:>12.4g}{suspected}"
        )
    if found.bad:
        lines.append(f"first ({found.bad.where}): {found.bad.name} {found.bad.value}")
    return [*lines, str(found.fault) if found.fault else not_reproduced(found)]


def not_reproduced(found: "Reproduction") -> str:
    return (
        f"Here the update is valid, with a gradient norm of {found.grad_norm:.4g}: the cause of the fault was the"
        " machine or its arithmetic (a card, other threads), not the batch."
    )


def batch_report(kept: "KeptBatch", found: "Reproduction") -> dict[str, Any]:
    """The JSON line."""
    fault = found.fault
    suspect = fault.suspect if fault else None
    return {
        "step": kept.step + 1,
        "recorded": {"kind": kept.kind, "sample": kept.sample},
        "reproduced": fault is not None and fault.refusal.kind == kept.kind,
        "kind": fault.refusal.kind if fault else None,
        "sample": suspect.sample if suspect else None,
        "group": suspect.sample.partition("[")[0] if suspect else None,
        "loss": finite(suspect.loss) if suspect else None,
        "grad_norm": finite(suspect.grad_norm) if suspect else finite(found.grad_norm),
        "first": asdict(found.bad) if found.bad else None,
    }
