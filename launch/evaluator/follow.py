"""Evaluates the checkpoints of a run while it trains, without stopping it.

    eval.beside = true     `run` starts this process, starts it again if it dies, and waits for it at the end
    eval RUN --follow      the same by hand, also for a run that was started without it

    base -> each checkpoint once, oldest first -> final -> (the learner has ended) best.json, summary.json

Checkpoints are due every `eval.every` steps, or all of them if that is 0. Tasks, draws and threads, and so the results,
are those of an evaluation by the run itself. An existing result for the same adapter and tasks is not made again, so
this process may be killed at any moment. While the learner runs, only eval/ is written here, and the learner takes
results in from there (BesideSchedule in learner/evaluation/schedule.py): training waits for nothing and changes in no
bit. On a CPU this process has a lower priority. On a card it takes turns with learner and actor, order by order, and
its base waits in host memory between them.
"""

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from msgspec import structs

from launch.commands.evaluate import AdapterEvaluator, adapter_evaluator, base_adapter
from learner.durable.checkpoint import CheckpointStore
from learner.durable.state import ADAPTER, Best, better
from learner.evaluation.schedule import in_words, label_of, result_of
from shared.config.processes import ComputeConfig, EvalConfig
from shared.config.tree import Config
from shared.errors import RunDirError, UserError
from shared.model.adapter_file import digest
from shared.process.watchdog import Watchdog, open_stacks
from shared.run.evaluation import Evaluation, read_evaluation, write_evaluation
from shared.run.file_lock import open_lock, sign, signature, try_lock_awhile
from shared.run.run_dir import RunDir
from shared.run.summary import first_and_last, read_summary, write_summary

log = logging.getLogger("evaluator")
NICE = 10
"""Learner and actor come first; on a machine that is never idle it still moves."""
LOOK_EVERY_S = 0.5
FREE_S = 30.0
"""Followed by hand, a run has ended when its summary says so, or when it has had no learner for so long."""

Tell = Callable[[str], None]
Beat = Callable[[str], None]


class Interrupted(Exception):
    """The run was stopped before its end, so what is missing can wait."""


@dataclass(frozen=True, kw_only=True)
class Missing:
    """An evaluation that is to be made."""

    label: str
    """Its name in eval/."""
    step: int
    """Of the checkpoint; 0 for what the run begins with."""
    adapter_sha256: str
    """Of its adapter."""


class CheckpointFollower:
    """Makes the evaluations of one run that are missing."""

    def __init__(
        self, run: RunDir, evaluation: EvalConfig, steps: int, keep: int, base: bytes, evaluator: AdapterEvaluator
    ) -> None:
        """steps: of the whole run. keep: checkpoint.keep. base: the adapter that the run begins with."""
        self.run = run
        self.evaluation = evaluation
        self.steps = steps
        self.base = base
        self.evaluator = evaluator
        self.store = CheckpointStore(run.checkpoints, keep)
        self.unreadable: set[Missing] = set()

    def follow(self, ended: Callable[[], bool], pause: Callable[[], None], tell: Tell) -> None:
        """Until the run has ended and nothing is missing."""
        last = False
        while not last:
            # Asked first: what was saved before the end is looked for after it.
            last = ended()
            while missing := self.missing():
                self.make(missing[0], tell)
            if not last:
                pause()

    def missing(self) -> list[Missing]:
        """The oldest first."""
        found = [Missing(label="base", step=0, adapter_sha256=digest(self.base))]
        for step, adapter_sha256 in sorted(self.store.digests(ADAPTER).items()):
            if self.is_due(step):
                label = "final" if step == self.steps else label_of(step)
                found.append(Missing(label=label, step=step, adapter_sha256=adapter_sha256))
        return [one for one in found if one not in self.unreadable and not self.is_made(one)]

    def is_due(self, step: int) -> bool:
        return not self.evaluation.every or self.evaluation.is_due(step) or step == self.steps

    def is_made(self, wanted: Missing) -> bool:
        if wanted.step in (0, self.steps):
            found = self.stored(wanted.label)
            tasks = self.evaluator.tasks_sha256
            same = found and (found.version, found.adapter_sha256, found.tasks_sha256)
            return same == (wanted.step, wanted.adapter_sha256, tasks)
        return self.result(wanted.step, wanted.adapter_sha256) is not None

    def result(self, step: int, adapter_sha256: str) -> Evaluation | None:
        return result_of(self.stored, step, adapter_sha256, self.evaluator.tasks_sha256)

    def stored(self, label: str) -> Evaluation | None:
        return read_evaluation(self.run.eval / f"{label}.json")

    def make(self, wanted: Missing, tell: Tell) -> None:
        try:
            adapter = self.store.load(wanted.step).files[ADAPTER] if wanted.step else self.base
        except UserError as error:
            # It was removed meanwhile, or it is damaged.
            log.warning("%s is not evaluated: %s", wanted.label, error)
            self.unreadable.add(wanted)
            return
        found = self.evaluator.run(wanted.label, wanted.step, adapter)
        write_evaluation(self.run.eval, found)
        tell(f"{wanted.label}: {in_words(found)}")

    def settle(self) -> None:
        """The learner has ended: the best checkpoint and the summary know every result."""
        best: Best | None = None
        with self.run.locked():
            for step, adapter_sha256 in sorted(self.store.digests(ADAPTER).items()):
                # Not only of those that are due: a former end of the run may be the best.
                found = self.result(step, adapter_sha256)
                if found:
                    best = better(best, Best(step=step, accuracy=found.greedy.accuracy))
            if best:
                self.store.note_best(best.step, best.accuracy)
            summary = read_summary(self.run)
            if summary:
                write_summary(self.run, structs.replace(summary, eval=first_and_last(self.run)))


class Ending:
    """Whether a run that somebody else started has ended."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self.free_since = 0.0

    def __call__(self) -> bool:
        now = time.monotonic()
        if self.run.is_in_use():
            self.free_since = 0.0
            return False
        self.free_since = self.free_since or now
        summary = read_summary(self.run)
        return (summary is not None and summary.status != "running") or now - self.free_since > FREE_S


def follow_by_hand(follower: CheckpointFollower) -> None:
    """Prints each result."""
    ending = Ending(follower.run)
    follower.follow(ending, lambda: time.sleep(LOOK_EVERY_S), lambda text: print(text, flush=True))
    if follower.evaluation.beside:
        follower.settle()


def follow_supervised(
    run: RunDir,
    silence_s: float,
    opened: Callable[[Beat], AbstractContextManager[CheckpointFollower]],
    asked_to_end: Callable[[], bool],
) -> None:
    """As the run's own process. opened: `following` it. asked_to_end: the learner has ended, so the rest may be made if
    the run is done."""

    def beat(phase: str) -> None:
        watchdog.progress()
        if asked_to_end() and not is_done(run):
            raise Interrupted

    def pause() -> None:
        beat("waiting for a checkpoint")
        time.sleep(LOOK_EVERY_S)

    with open_stacks(run.stacks("evaluator")) as stacks:
        watchdog = Watchdog(silence_s, stacks)
        try:
            with opened(beat) as follower:
                follower.follow(asked_to_end, pause, log.info)
                follower.settle()
        except Interrupted:
            log.info("the run was stopped; the rest is evaluated when it is resumed")
        finally:
            watchdog.rest()


@contextmanager
def following(run: RunDir, config: Config, beat: Beat = lambda phase: None) -> Iterator[CheckpointFollower]:
    """beat: called while completions are decoded; it may raise."""
    os.nice(NICE)
    config = structs.replace(config, compute=beside(config.compute))
    with alone(run), adapter_evaluator(config, run, beat=beat) as evaluator:
        base = base_adapter(run, config.model, config.lora, config.run.seed)
        yield CheckpointFollower(run, config.eval, config.run.steps, config.checkpoint.keep, base, evaluator)


def beside(compute: ComputeConfig) -> ComputeConfig:
    """The evaluator computes on the actors' card and leaves it free between turns."""
    return structs.replace(compute, residency="swap", learner_card=compute.actor_card)


@contextmanager
def alone(run: RunDir) -> Iterator[None]:
    """RunDirError if another process follows the run."""
    lock = run.eval / "lock"
    fd = open_lock(lock)
    try:
        if not try_lock_awhile(fd):
            raise RunDirError(f"{run.path} is being evaluated by {signature(fd)}; let it go on, or end it first.")
        sign(fd, lock)
        yield
    finally:
        os.close(fd)


def is_done(run: RunDir) -> bool:
    summary = read_summary(run)
    return summary is not None and summary.status == "done"
