"""When evaluations are made, and that one which is there is not made again."""

from collections.abc import Collection

import pytest

from learner.evaluation.schedule import BesideSchedule, EvalSchedule, in_words
from shared.config.processes import EvalConfig
from shared.run.evaluation import Evaluation
from tests.support.fakes import toy_evaluation


class MemoryStore:
    """Reports by label."""

    def __init__(self) -> None:
        self.kept: dict[str, Evaluation] = {}
        self.rows: list[int] = []
        self.noted: list[int] = []

    def evaluation(self, label: str) -> Evaluation | None:
        return self.kept.get(label)

    def write_evaluation(self, evaluation: Evaluation) -> None:
        self.kept[evaluation.label] = evaluation

    def note(self, evaluation: Evaluation, *, may_be_best: bool) -> None:
        self.rows.append(evaluation.version)
        self.noted += [evaluation.version] * may_be_best


class Start:
    """One start of a run; notes what was evaluated."""

    def __init__(self, store: MemoryStore, every: int, steps: int = 6) -> None:
        self.made: list[tuple[str, int, str]] = []
        self.schedule = EvalSchedule(
            EvalConfig(every=every), steps, self.evaluate, lambda version: f"v{version}", store, "tasks of 2"
        )

    def evaluate(self, label: str, version: int, digest: str) -> Evaluation:
        self.made.append((label, version, digest))
        return toy_evaluation([True, False], label=label, version=version, adapter_sha256=digest)

    def go(self, first: int, last: int) -> list[str]:
        """Begin behind step `first`, do steps until `last`, end if that is all."""
        self.schedule.begin(first)
        for done in range(first + 1, last + 1):
            self.schedule.after(done)
        if last == self.schedule.steps:
            self.schedule.end(last)
        return [label for label, _, _ in self.made]


def test_before_on_the_way_and_after() -> None:
    assert Start(MemoryStore(), every=2).go(0, 6) == ["base", "step-000002", "step-000004", "final"]
    assert Start(MemoryStore(), every=5).go(0, 6) == ["base", "step-000005", "final"]
    assert Start(MemoryStore(), every=0).go(0, 6) == ["base", "final"]


def test_a_later_life_makes_what_is_missing_and_nothing_twice() -> None:
    store = MemoryStore()
    assert Start(store, every=2).go(0, 3) == ["base", "step-000002"]
    # Steps 3 and 4 are done again; the checkpoint of step 2 has its evaluation.
    assert Start(store, every=2).go(2, 6) == ["step-000004", "final"]
    assert Start(store, every=2).go(6, 6) == []
    # The start that made the checkpoint of step 4 ended before it was evaluated.
    del store.kept["step-000004"]
    assert Start(store, every=2).go(4, 6) == ["step-000004"]


def test_a_run_that_is_trained_further_has_a_new_end() -> None:
    store = MemoryStore()
    Start(store, every=0, steps=6).go(0, 6)
    assert Start(store, every=0, steps=8).go(6, 8) == ["final"]
    assert store.kept["final"].version == 8
    assert store.kept["step-000006"].version == 6, "the former end is kept"
    assert store.rows == [0, 6, 8]


def test_another_adapter_is_evaluated_again() -> None:
    store = MemoryStore()
    store.kept["base"] = toy_evaluation([True], label="base", adapter_sha256="of another run")
    assert Start(store, every=0).go(0, 1) == ["base"]
    assert store.kept["base"].adapter_sha256 == "v0"


def test_words_name_interval_n_and_seed() -> None:
    words = in_words(toy_evaluation([True, True, False, True], seed=7))
    assert words.startswith("greedy 75.0% [30.1%, 95.4%], sampled 75.0% [30.1%, 95.4%]")
    assert words.endswith("n = 4, seed 7, in 0.0 s")


def test_what_was_evaluated_is_judged_once_in_each_life_that_comes_by() -> None:
    store = MemoryStore()
    Start(store, every=2).go(0, 6)
    assert store.noted == [2, 4, 6]
    # The start that made the report of step 4 may have ended before it was judged.
    Start(store, every=2).go(4, 6)
    assert store.noted == [2, 4, 6, 4, 6]
    # Without evaluations on the way there is nothing to choose from.
    Start(alone := MemoryStore(), every=0).go(0, 6)
    assert alone.noted == [] and alone.rows == [0, 6]


def test_the_end_of_a_run_that_is_trained_further_stays_a_candidate() -> None:
    store = MemoryStore()
    Start(store, every=4, steps=6).go(0, 6)
    Start(store, every=4, steps=8).go(6, 8)
    assert store.noted == [4, 6, 6, 8]


def test_an_end_that_was_due_is_not_evaluated_again_when_the_run_is_trained_further() -> None:
    store = MemoryStore()
    Start(store, every=4, steps=8).go(0, 8)
    assert Start(store, every=4, steps=12).go(8, 12) == ["final"]
    assert (store.kept["step-000008"].version, store.kept["final"].version) == (8, 12)
    assert Start(store, every=4, steps=12).go(8, 9) == [], "also when its end has been replaced"
    assert store.noted == [4, 8, 8, 12, 8]


def test_a_report_on_other_tasks_is_made_again() -> None:
    store = MemoryStore()
    Start(store, every=2).go(0, 2)
    store.kept["step-000002"] = toy_evaluation([True], label="step-000002", version=2, adapter_sha256="v2")
    assert Start(store, every=2).go(2, 3) == ["step-000002"]


class ResultStore(MemoryStore):
    """Where another process leaves its results."""

    def __init__(self, *steps: int) -> None:
        super().__init__()
        self.steps = steps
        self.kept_steps: set[int] = set()
        self.time = 0
        self.looked_for: list[str] = []

    def evaluation(self, label: str) -> Evaluation | None:
        self.looked_for.append(label)
        return super().evaluation(label)

    def written_at(self) -> int:
        return self.time

    def adapter(self, step: int) -> str:
        return f"v{step}" if step in self.steps else ""

    def adapters(self) -> dict[int, str]:
        self.looked_for.append("all checkpoints")
        return {step: f"v{step}" for step in self.steps}

    def keep(self, steps: Collection[int]) -> None:
        self.kept_steps = set(steps)

    def came(self, label: str, version: int, **changes: str) -> None:
        self.time += 1
        found = {"tasks_sha256": "tasks of 2", "adapter_sha256": f"v{version}"} | changes
        self.kept[label] = toy_evaluation([True, False], label=label, version=version, **found)


def beside(store: ResultStore, steps: int = 8) -> BesideSchedule:
    return BesideSchedule(EvalConfig(every=2, beside=True), steps, store, "tasks of 2")


def test_results_count_when_they_come_and_their_checkpoints_stay_until_then() -> None:
    store = ResultStore(2, 3, 4)
    schedule = beside(store)
    schedule.begin(0)
    for done in (1, 2, 3):
        schedule.after(done)
    assert (store.rows, store.kept_steps) == ([], {2})
    store.came("base", 0)
    store.came("step-000004", 4)
    schedule.after(4)
    assert (store.rows, store.noted, store.kept_steps) == ([0, 4], [4], {2})
    store.came("step-000002", 2)
    schedule.after(5)
    schedule.after(6)
    assert (store.rows, store.noted, store.kept_steps) == ([0, 4, 2], [4, 2], set())


def test_a_step_in_which_no_result_came_looks_at_none_however_many_wait() -> None:
    store = ResultStore(*range(2, 400))
    schedule = beside(store, steps=400)
    schedule.begin(0)
    for done in range(1, 399):
        schedule.after(done)
    store.looked_for.clear()
    schedule.after(399)
    assert store.looked_for == [] and len(store.kept_steps) == 199
    store.came("step-000002", 2)
    schedule.after(400)
    assert store.noted == [2] and len(store.kept_steps) == 198


def test_of_two_results_at_the_same_time_the_second_is_seen_too() -> None:
    """The clock of a disk goes in ticks."""
    store = ResultStore(2, 4)
    schedule = beside(store)
    schedule.begin(0)
    for done in range(1, 8):
        schedule.after(done)
    store.came("step-000002", 2)
    schedule.after(8)
    store.came("step-000004", 4)
    store.time -= 1
    schedule.after(9)
    assert store.noted == [2, 4]


def test_a_step_that_is_done_again_finds_its_result_at_once() -> None:
    store = ResultStore(2, 4)
    schedule = beside(store)
    store.came("step-000004", 4)
    schedule.begin(2)
    schedule.after(3)
    schedule.after(4)
    assert (store.noted, store.kept_steps) == ([4], {2})


def test_the_log_says_once_that_many_checkpoints_wait(caplog: pytest.LogCaptureFixture) -> None:
    schedule = beside(ResultStore(*range(2, 100)), steps=100)
    schedule.begin(0)
    for done in range(1, 41):
        schedule.after(done)
    assert not caplog.records
    for done in range(41, 100):
        schedule.after(done)
    (record,) = caplog.records
    assert record.getMessage().startswith("21 checkpoints wait for their evaluation")


def test_a_result_of_other_tasks_or_of_another_adapter_does_not_count() -> None:
    store = ResultStore(2, 4)
    schedule = beside(store)
    store.came("base", 0, tasks_sha256="others")
    store.came("step-000002", 2, tasks_sha256="others")
    store.came("step-000004", 4, adapter_sha256="before it was sampled again")
    schedule.begin(4)
    assert (store.rows, store.noted, store.kept_steps) == ([], [], {2, 4})
    store.came("final", 4)
    schedule.end(4)
    assert (store.noted, store.kept_steps) == ([4], {2}), "a former end of the run"


def test_the_end_of_a_run_that_is_evaluated_beside_and_trained_further_stays_a_candidate() -> None:
    store = ResultStore(2, 5)
    store.came("final", 5)
    beside(store).begin(5)
    assert (store.noted, store.kept_steps) == ([5], {2})
    store.came("final", 8)
    assert store.kept["step-000005"].version == 5, "it outlives the next end"
    other = ResultStore(5, 8)
    for done, changes in ((5, {"tasks_sha256": "others"}), (5, {"adapter_sha256": "damaged"}), (4, {})):
        other.came("final", 5, **changes)
        beside(other).begin(done)
    other.came("final", 8)
    beside(other).begin(8)
    assert other.noted == [8] and list(other.kept) == ["final"], "the end of this run"
