"""The size of a step: how it shrinks, when it grows again, and where it is noted."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from learner.durable.journal import Journal
from learner.durable.recorder import Index, JournalRecorder, RecordedOrders, pack_void
from learner.update.budget import FIRST_WAIT, Attempts, Budget, OutOfMemory, Size
from tests.support.fake_card import FakeDriver
from tests.support.fakes import filled, toy_orders, toy_policy
from tests.support.steps import NotedSizes

FULL = Size(tokens=4096, rows=512)


class Nothing:
    """An update that leaves nothing behind."""

    def undo(self) -> None:
        """Nothing to do."""


def shrunk(budget: Budget, part: Size) -> list[Size]:
    """The sizes that are tried while nothing fits. part: the largest of each attempt, as far as the size allows."""
    found: list[Size] = []
    while True:
        tokens = min(part.tokens, budget.now.tokens)
        budget.saw(Size(tokens=tokens if tokens > 100 else 0, rows=min(part.rows, 2000)))
        if not budget.shrink():
            return found
        found.append(budget.now)


def test_first_rows_are_halved_then_tokens_until_samples_are_alone() -> None:
    found = shrunk(Budget(FULL), part=FULL)
    assert [size.rows for size in found] == [256, 128, 64, *[64] * 6]
    assert [size.tokens for size in found] == [4096] * 3 + [2048, 1024, 512, 256, 128, 64]


def test_a_size_that_would_change_nothing_is_not_tried() -> None:
    """The step has 900 tokens in its largest micro-batch and 150 rows."""
    found = shrunk(Budget(FULL), part=Size(tokens=900, rows=150))
    assert found == [
        Size(tokens=4096, rows=75),
        Size(tokens=4096, rows=64),
        *(Size(tokens=tokens, rows=64) for tokens in (450, 225, 112, 56)),
    ]


def test_the_largest_part_is_that_of_the_last_attempt() -> None:
    budget = Budget(FULL)
    budget.saw(Size(tokens=3000, rows=512))
    assert budget.shrink() and budget.now.rows == 256
    budget.saw(Size(tokens=0, rows=20))
    assert not budget.shrink()


def run_steps(budget: Budget, count: int, fits: Callable[[Size], bool]) -> list[int]:
    """The steps in which memory ran out."""
    failed: list[int] = []
    for step in range(count):
        budget.saw(budget.now)
        while not fits(budget.now):
            failed.append(step)
            assert budget.shrink()
            budget.saw(budget.now)
        budget.end()
    return failed


def test_the_size_comes_back_once_there_is_memory_again() -> None:
    budget = Budget(FULL)
    run_steps(budget, 1, lambda size: size.tokens <= 1024)
    assert budget.now == Size(tokens=1024, rows=64)
    grown: list[Size] = []
    for _ in range(10 * FIRST_WAIT):
        before = budget.now
        budget.end()
        grown += [] if budget.now == before else [budget.now]
    assert grown == [
        *(Size(tokens=tokens, rows=64) for tokens in (2048, 4096)),
        *(Size(tokens=4096, rows=rows) for rows in (128, 256, 512)),
    ]


def test_a_size_that_never_fits_is_tried_less_and_less_often() -> None:
    failed = run_steps(Budget(FULL), 4000, lambda size: size.tokens <= 2048)
    tries = sorted(set(failed))
    gaps = [later - earlier for earlier, later in pairwise(tries)]
    assert tries[0] == 0 and 5 <= len(tries) <= 9
    assert all(later > 1.9 * earlier for earlier, later in pairwise(gaps))


def test_a_budget_that_never_failed_stays_and_has_nothing_to_save() -> None:
    budget = Budget(FULL)
    assert run_steps(budget, 100, lambda size: True) == []
    assert budget.now == FULL and budget.state_dict() == {}


def test_its_state_goes_on_where_it_was() -> None:
    first, second = Budget(FULL), Budget(FULL)
    run_steps(first, 20, lambda size: size.tokens <= 1024)
    second.load_state_dict(first.state_dict())
    assert run_steps(first, 200, lambda size: size.tokens <= 1024) == run_steps(
        second, 200, lambda size: size.tokens <= 1024
    )
    assert vars(first) == vars(second)


def attempts_of(budget: Budget, notes: NotedSizes, *, on_card: bool = False) -> Attempts:
    return Attempts(budget, Nothing(), notes, FakeDriver() if on_card else None)


def fitting(budget: Budget, tokens: int) -> Callable[[], Size]:
    """Work that runs out of memory above so many tokens; it returns the size."""

    def work() -> Size:
        budget.saw(budget.now)
        if budget.now.tokens > tokens:
            raise torch.OutOfMemoryError("too many")
        return budget.now

    return work


def test_a_step_that_was_computed_before_is_computed_in_the_same_size() -> None:
    """Also the steps after it: the budget is what it was in the first run."""
    notes, first = NotedSizes(), Budget(FULL)
    run = attempts_of(first, notes)
    sizes = [run.until_it_fits(step, fitting(first, 4096 if step != 2 else 1000)) for step in range(40)]
    assert sizes[1] == FULL != sizes[2] and set(notes.sizes) >= {2, 3, 20} and not {0, 1} & set(notes.sizes)
    second = Budget(FULL)
    again = attempts_of(second, NotedSizes({step: size for step, size in notes.sizes.items() if step < 10}))
    assert [again.until_it_fits(step, fitting(second, 4096)) for step in range(40)] == sizes
    assert vars(second) == vars(first)


def test_on_a_card_every_step_is_noted() -> None:
    """Without that, a step that a run had finished before it died could not be told from one that it had not."""
    notes, budget = NotedSizes(), Budget(FULL)
    attempts_of(budget, notes, on_card=True).until_it_fits(7, lambda: True)
    assert notes.sizes == {7: FULL}
    attempts_of(budget, off := NotedSizes(), on_card=False).until_it_fits(7, lambda: True)
    assert off.sizes == {}


def test_a_noted_size_that_does_not_fit_now_is_noted_again() -> None:
    notes, budget = NotedSizes({0: FULL}), Budget(FULL)
    attempts_of(budget, notes, on_card=True).until_it_fits(0, fitting(budget, 2048))
    assert notes.sizes == {0: Size(tokens=2048, rows=64)}


def test_what_does_not_fit_at_all_is_said_in_one_sentence() -> None:
    budget = Budget(Size(tokens=64, rows=64))

    def work() -> None:
        budget.saw(Size(tokens=0, rows=30))
        raise torch.OutOfMemoryError("none")

    expected = (
        r"^Step 5 does not fit into the memory of the card with one completion at a time and 64 rows of the head; end"
        r" other programs on the card, or use batch.recompute = \"always\", a smaller rollout.max_new_tokens, .*\.$"
    )
    with pytest.raises(OutOfMemory, match=expected):
        attempts_of(budget, NotedSizes()).until_it_fits(4, work)


def test_other_errors_pass() -> None:
    def work() -> None:
        raise RuntimeError("an error of ours")

    with pytest.raises(RuntimeError, match="ours"):
        attempts_of(Budget(FULL), NotedSizes()).until_it_fits(0, work)


SMALL, SMALLER = Size(tokens=1024, rows=64), Size(tokens=512, rows=64)


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal.open(tmp_path / "journal")


def recorder_of(journal: Journal, first_step: int = 0) -> JournalRecorder:
    return JournalRecorder(journal, first_step, lambda group: None)


def test_noted_sizes_are_in_the_journal_among_the_orders(journal: Journal) -> None:
    recorder = recorder_of(journal)
    recorder.record([filled(order, toy_policy(0)) for order in toy_orders(0)])
    recorder.note_size(0, SMALL)
    recorder.note_size(0, SMALL)
    recorder.note_size(3, SMALLER)
    assert journal.next_record == 3
    found = recorder_of(journal)
    assert (found.size_of(0), found.size_of(1), found.size_of(3)) == (SMALL, None, SMALLER)
    assert found.find(toy_orders(0)[0]) and found.last_step(journal.tail) == 3
    assert set(Index(journal.reading().segments).found) == {toy_orders(0)[0].order_id}
    recorder.checkpointed(3)
    assert recorder.sizes == {3: SMALLER}


def test_the_last_of_two_sizes_counts_and_a_void_cancels_them(journal: Journal) -> None:
    recorder = recorder_of(journal)
    for step, size in ((0, SMALL), (1, SMALL), (0, SMALLER)):
        recorder.note_size(step, size)
    journal.append(pack_void(1))
    for notes in (recorder_of(journal), RecordedOrders(journal.reading().segments)):
        assert notes.sizes == {0: SMALLER}


def test_a_replay_says_which_steps_had_another_size(journal: Journal) -> None:
    recorder_of(journal).note_size(0, SMALL)
    recorder_of(journal).note_size(1, SMALL)
    replay = RecordedOrders(journal.reading().segments)
    replay.note_size(0, SMALL)
    replay.note_size(1, SMALLER)
    assert replay.resized == [1]
