"""Hands of blows, played until each has come.

Two blows of one hand may stand in each other's way: a kill behind a rename keeps the next life from renaming again.
What did not come in its hand is dealt again, alone, with whatever trouble its hand began with. Blows that were to come
at a later passing may find none; those are let go.
"""

from collections.abc import Iterator, Sequence

from tests.chaos.plans import TROUBLE
from tests.chaos.pool import Pool
from tests.chaos.trial import Blow, Result, Task

ROUNDS = 3


def play(hosts: Pool, name: str, run: str, hands: Sequence[tuple[Blow, ...]]) -> Iterator[tuple[Task, Result]]:
    """Every trial that was needed."""
    for number in range(ROUNDS):
        tasks = [Task(name=f"{name}-{number}-{n}", run=run, blows=hand) for n, hand in enumerate(hands)]
        hands = []
        for task, result in zip(tasks, hosts.run(tasks), strict=True):
            yield task, result
            hands += [again(task, blow) for blow in left(task, result)]


def left(task: Task, result: Result) -> list[Blow]:
    """What should have come and did not."""
    return [blow for n, blow in enumerate(task.blows) if n in result.unstruck and blow.hit == 1]


def again(task: Task, blow: Blow) -> tuple[Blow, ...]:
    """A hand of its own."""
    return (*TROUBLE, blow) if task.blows[: len(TROUBLE)] == TROUBLE else (blow,)
