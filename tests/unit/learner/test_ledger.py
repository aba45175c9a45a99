"""What a step leaves behind: rows, checkpoints when due, and a gate against actors that disagree."""

from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import pytest

from learner.curriculum.curriculum import Shuffled
from learner.objective.batch import StepBatch, step_batch, teaching_samples
from learner.quarantine.quarantine import KeptBatch
from learner.reports.step_report import Ledger
from learner.state import Past
from learner.update.figures import UpdateStats
from protocol.messages import FilledOrder, Timings
from shared.config.processes import CheckpointConfig, EvalConfig
from shared.config.tree import Config, LossConfig, RunConfig
from shared.run.metrics import StepMetrics
from tests.support.fakes import tiny_group

CONFIG = Config(run=RunConfig(steps=7), loss=LossConfig(max_mismatch=0.05), checkpoint=CheckpointConfig(every=3))
AGREED = UpdateStats(
    loss=0.2,
    grad_norm=0.1,
    lr=1e-4,
    ratios=np.ones(4),
    clipped=np.zeros(4, bool),
    importance=np.ones(4),
    kl=np.zeros(4),
    entropies=np.ones(4),
    mismatch=np.full(4, 0.01),
    weight_sum=1.0,
    constraint_loss=0.0,
    held_kl=np.zeros(0),
    noise=None,
    ewc_penalty=0.0,
)
FRESH = Past()


class NotedBooks:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.rows: list[StepMetrics] = []
        self.saved: list[int] = []
        self.past = FRESH

    def step(self, step: int, metrics: StepMetrics, answers: Sequence[FilledOrder], batch: StepBatch) -> None:
        self.rows.append(metrics)

    def quarantine(self, batch: KeptBatch) -> None:
        """Not kept."""

    def checkpoint(self, step: int, past: Past) -> None:
        self.saved.append(step)
        self.past = past


def answer(version: int, scores: Sequence[float] = (1.0, 0.0)) -> FilledOrder:
    timings = Timings(wait_s=0.0, rollout_s=0.0, verify_s=0.0, memory_mb=1.0)
    return FilledOrder(
        order_id="train/000000/u0000",
        policy_version=version,
        adapter_sha256="a" * 64,
        groups=(tiny_group(scores, [2] * len(scores)),),
        timings=timings,
    )


def record(
    ledger: Ledger, step: int, stats: UpdateStats | None = AGREED, version: int | None = None, mean: float = 0.5
) -> None:
    answers = [answer(step if version is None else version, [1.0] * round(4 * mean) + [0.0] * round(4 - 4 * mean))]
    ledger.begin()
    ledger.record(step, answers, step_batch(teaching_samples(answers[0].groups, CONFIG), 0, CONFIG), stats)


def ledger_over(books: NotedBooks, stop: Callable[[], bool] = lambda: False, past: Past = FRESH) -> Ledger:
    return Ledger(CONFIG, books, past, stop, Shuffled(8, seed=0).metrics)


def test_each_step_is_a_row() -> None:
    books = NotedBooks()
    ledger = ledger_over(books)
    for step in range(3):
        record(ledger, step)
    assert [row.step for row in books.rows] == [1, 2, 3]
    assert [row.policy_version for row in books.rows] == [0, 1, 2]


def test_a_checkpoint_is_due_every_k_steps_and_at_the_end() -> None:
    books = NotedBooks()
    ledger = ledger_over(books)
    for step in range(7):
        record(ledger, step)
    assert books.saved == [3, 6, 7]
    assert not ledger.stop_requested


@pytest.mark.parametrize(("problems", "saved"), [(8, [2, 3, 4, 6, 7]), (0, [3, 6, 7])])
def test_a_step_that_is_evaluated_is_saved_too(problems: int, saved: list[int]) -> None:
    books = NotedBooks()
    config = msgspec.structs.replace(CONFIG, eval=EvalConfig(every=2, problems=problems))
    ledger = Ledger(config, books, FRESH, lambda: False, Shuffled(8, seed=0).metrics)
    for step in range(7):
        record(ledger, step)
    assert books.saved == saved


def test_asked_to_stop_it_saves_at_once() -> None:
    books = NotedBooks()
    asked = [False, True]
    ledger = ledger_over(books, stop=lambda: asked.pop(0))
    record(ledger, 0)
    assert (ledger.stop_requested, books.saved) == (False, [])
    record(ledger, 1)
    assert ledger.stop_requested and books.saved == [2]


def test_a_step_without_an_update_passes_the_gate() -> None:
    books = NotedBooks()
    record(ledger_over(books), 2, None)
    assert books.saved == [3]


def test_time_goes_on_from_earlier_lives() -> None:
    books = NotedBooks()
    ledger = ledger_over(books, past=Past(wall_s=1000.0))
    ledger.begin()
    with ledger.updating():
        pass
    record(ledger, 0)
    (row,) = books.rows
    assert 1000.0 <= row.time_s < 1060.0
    assert row.update_s >= 0.0 and row.step_s < 60.0
    assert row.learner_mb > 1.0


def test_a_checkpoint_that_is_asked_for_is_made_once() -> None:
    books = NotedBooks()
    ledger = ledger_over(books)
    ledger.save(0)
    assert books.saved == [], "nothing was done in this life"
    for step in range(4):
        record(ledger, step)
    ledger.save(4)
    ledger.save(4)
    assert books.saved == [3, 4]
