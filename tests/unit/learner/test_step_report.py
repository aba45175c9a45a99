"""What a step leaves behind: rows, checkpoints when due, and a gate against actors that disagree."""

from collections.abc import Callable, Sequence

import msgspec
import pytest

from learner.curriculum.curriculum import Shuffled
from learner.durable.state import RunTotals
from learner.reports.step_report import StepReport
from learner.update.figures import StepResult, UpdateStats
from protocol.messages import FilledOrder
from shared.config.processes import CheckpointConfig, EvalConfig
from shared.config.tree import Config, LossConfig, RunConfig
from shared.process.card import CardMemory
from shared.process.energy import EnergyMeter
from shared.process.lease import Turn
from shared.run.metrics import StepMetrics
from tests.support.fakes import tiny_group
from tests.support.steps import collected_of, step_batch, teaching_samples, update_stats
from tests.support.wire_examples import timings

CONFIG = Config(run=RunConfig(steps=7), loss=LossConfig(max_mismatch=0.05), checkpoint=CheckpointConfig(every=3))
AGREED = update_stats()
FRESH = RunTotals()


class NotedFiles:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.rows: list[StepMetrics] = []
        self.saved: list[int] = []
        self.totals = FRESH

    def step(self, step: int, metrics: StepMetrics, collected: object, batch: object, result: object) -> None:
        self.rows.append(metrics)

    def checkpoint(self, step: int, totals: RunTotals) -> None:
        self.saved.append(step)
        self.totals = totals


def filled_order(version: int, scores: Sequence[float] = (1.0, 0.0)) -> FilledOrder:
    return FilledOrder(
        order_id="train/000000/u0000",
        policy_version=version,
        adapter_sha256="a" * 64,
        groups=(tiny_group(scores, [2] * len(scores)),),
        timings=timings(),
    )


def record(
    report: StepReport, step: int, stats: UpdateStats | None = AGREED, version: int | None = None, mean: float = 0.5
) -> None:
    filled = [filled_order(step if version is None else version, [1.0] * round(4 * mean) + [0.0] * round(4 - 4 * mean))]
    report.begin()
    batch = step_batch(teaching_samples(filled[0].groups, CONFIG), 0, CONFIG)
    report.record(step, collected_of(filled, CONFIG), batch, StepResult(stats=stats))


def report_over(files: NotedFiles, stop: Callable[[], bool] = lambda: False, totals: RunTotals = FRESH) -> StepReport:
    return StepReport(CONFIG, files, totals, stop, Shuffled(8, seed=0).metrics)


def test_each_step_is_a_row() -> None:
    files = NotedFiles()
    report = report_over(files)
    for step in range(3):
        record(report, step)
    assert [row.step for row in files.rows] == [1, 2, 3]
    assert [row.policy_version for row in files.rows] == [0, 1, 2]


def test_metrics_of_ever_new_names_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    report = report_over(NotedFiles())
    first = {f"{number}": 1.0 for number in range(60)}
    assert report.within_name_limit(first) == first
    later = {"59": 2.0, **{f"{number}": 3.0 for number in range(60, 70)}}
    assert list(report.within_name_limit(later)) == ["59", "60", "61", "62", "63"]
    assert report.within_name_limit({"one more": 1.0, "7": 4.0}) == {"7": 4.0}
    (said,) = (record.getMessage() for record in caplog.records)
    assert said == "log_metric got more than 64 names; 64 is left out"


def test_a_checkpoint_is_due_every_k_steps_and_at_the_end() -> None:
    files = NotedFiles()
    report = report_over(files)
    for step in range(7):
        record(report, step)
    assert files.saved == [3, 6, 7]
    assert not report.stop_requested


@pytest.mark.parametrize(("problems", "saved"), [(8, [2, 3, 4, 6, 7]), (0, [3, 6, 7])])
def test_a_step_that_is_evaluated_is_saved_too(problems: int, saved: list[int]) -> None:
    files = NotedFiles()
    config = msgspec.structs.replace(CONFIG, eval=EvalConfig(every=2, problems=problems))
    report = StepReport(config, files, FRESH, lambda: False, Shuffled(8, seed=0).metrics)
    for step in range(7):
        record(report, step)
    assert files.saved == saved


def test_asked_to_stop_it_saves_at_once() -> None:
    files = NotedFiles()
    asked = [False, True]
    report = report_over(files, stop=lambda: asked.pop(0))
    record(report, 0)
    assert (report.stop_requested, files.saved) == (False, [])
    record(report, 1)
    assert report.stop_requested and files.saved == [2]


def test_a_step_without_an_update_passes_the_gate() -> None:
    files = NotedFiles()
    record(report_over(files), 2, None)
    assert files.saved == [3]


def test_time_goes_on_from_earlier_lives() -> None:
    files = NotedFiles()
    report = report_over(files, totals=RunTotals(wall_s=1000.0))
    report.begin()
    turn = Turn(waited_s=0.0)
    with report.updating(turn):
        pass
    turn.peak = CardMemory(allocated=2**21)
    record(report, 0)
    (row,) = files.rows
    assert 1000.0 <= row.time_s < 1060.0
    assert row.update_s >= 0.0 and row.step_s < 60.0
    assert row.learner_mb > 1.0 and row.card_mb == {"learner_allocated": 2.0}, "known when the turn has ended"


class Counted:
    """Each look finds a joule more than the one before."""

    def __init__(self) -> None:
        self.looks = 0.0

    def joules(self) -> float:
        self.looks += 1.0
        return self.looks


def test_a_row_has_the_energy_of_its_step_alone() -> None:
    files, counter = NotedFiles(), Counted()
    meter = EnergyMeter({"cpu": counter, "card": "absent"})
    report = StepReport(CONFIG, files, FRESH, lambda: False, Shuffled(8, seed=0).metrics, meter=meter)
    record(report, 0)
    # Between the steps.
    meter.look()
    record(report, 1)
    assert [row.energy for row in files.rows] == [{"cpu": 2.0}, {"cpu": 5.0}]


def test_the_time_that_the_base_took_is_in_the_row() -> None:
    files = NotedFiles()
    report = report_over(files)
    report.begin()
    turn = Turn(waited_s=0.0)
    with report.updating(turn):
        pass
    turn.swap_s = 0.75
    record(report, 0)
    assert files.rows[0].swap_s == 0.75


def test_a_checkpoint_that_is_asked_for_is_made_once() -> None:
    files = NotedFiles()
    report = report_over(files)
    report.save(0)
    assert files.saved == [], "nothing was done in this start"
    for step in range(4):
        record(report, step)
    report.save(4)
    report.save(4)
    assert files.saved == [3, 4]
