"""The order of tasks: every task once an epoch, from the run's seed alone."""

import json
import math

from learner.curriculum.curriculum import Shuffled
from shared.seeding import permutation


def test_every_task_comes_once_an_epoch() -> None:
    curriculum = Shuffled(num_tasks=10, seed=0)
    for _ in range(3):
        assert sorted(curriculum.next(4) + curriculum.next(6)) == list(range(10))


def test_the_order_of_an_epoch_is_made_once() -> None:
    curriculum = Shuffled(num_tasks=10, seed=3)
    first = curriculum.next(4)
    made = curriculum.order
    second = curriculum.next(6)
    assert curriculum.order is made
    third = curriculum.next(3)
    assert first + second == permutation(3, 0, 10).tolist() and third == permutation(3, 1, 10).tolist()[:3]
    curriculum.load_state_dict({"position": 2})
    assert curriculum.next(9) == [*first, *second, *third][2:11], "back across the end of an epoch"


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    curriculum = Shuffled(num_tasks=20, seed=0)
    first, second = curriculum.next(20), curriculum.next(20)
    assert first != second
    assert Shuffled(20, seed=1).next(20) != first
    assert first != list(range(20))


def test_how_many_are_asked_for_at_once_makes_no_difference() -> None:
    one, other = Shuffled(7, seed=2), Shuffled(7, seed=2)
    assert [task for _ in range(10) for task in one.next(3)] == other.next(30)


def test_saved_and_loaded_it_goes_on_where_it_was() -> None:
    undisturbed, saved = Shuffled(7, seed=2), Shuffled(7, seed=2)
    undisturbed.next(11)
    saved.next(11)
    loaded = Shuffled(7, seed=2)
    loaded.load_state_dict(json.loads(json.dumps(saved.state_dict())))
    loaded.observe([])
    assert math.isnan(loaded.metrics().pass_rate) and loaded.metrics().effective_tasks == 7
    assert loaded.next(20) == undisturbed.next(20)


def test_more_than_an_epoch_at_once() -> None:
    tasks = Shuffled(num_tasks=3, seed=0).next(7)
    assert sorted(tasks[:3]) == sorted(tasks[3:6]) == [0, 1, 2]
