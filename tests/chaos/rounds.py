"""Runs batches of faults and repeats each fault that did not happen.

Two faults of one batch can exclude each other: after a kill behind a rename, the next start does not rename again. Such
a fault is tried again alone, after the faults that its batch began with. A fault that was planned for a later visit of
its point may never happen; it is not repeated.
"""

from collections.abc import Iterator, Sequence

from shared.run.failpoints import Fault
from tests.chaos.plans import TROUBLE
from tests.chaos.pool import Pool
from tests.chaos.trial import Result, Trial

ROUNDS = 3


def run_trials(
    hosts: Pool, name: str, run: str, batches: Sequence[tuple[Fault, ...]]
) -> Iterator[tuple[Trial, Result]]:
    """Every trial that was needed."""
    for number in range(ROUNDS):
        trials = [Trial(name=f"{name}-{number}-{n}", run=run, faults=batch) for n, batch in enumerate(batches)]
        batches = []
        for trial, result in zip(trials, hosts.run(trials), strict=True):
            yield trial, result
            batches += [again(trial, fault) for fault in left(trial, result)]


def left(trial: Trial, result: Result) -> list[Fault]:
    """What should have happened and did not."""
    return [fault for n, fault in enumerate(trial.faults) if n in result.missed and fault.hit == 1]


def again(trial: Trial, fault: Fault) -> tuple[Fault, ...]:
    """A batch of its own."""
    return (*TROUBLE, fault) if trial.faults[: len(TROUBLE)] == TROUBLE else (fault,)
