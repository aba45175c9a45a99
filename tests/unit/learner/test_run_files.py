"""Which checkpoint is the best: by held-out accuracy, not by training reward."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from learner.durable.checkpoint import Checkpoint, CheckpointStore
from learner.durable.state import ADAPTER, Best, RunTotals, better
from learner.objective.batch import StepBatch
from learner.objective.judged import Collected
from learner.reports.run_files import RunFiles
from learner.update.figures import StepResult
from shared.config.load import config_to_json
from shared.config.processes import LogConfig
from shared.config.tree import Config
from shared.run.run_dir import RunDir
from shared.run.summary import ActorFigures, ActorsReport
from tests.support.fakes import spelled_words, toy_evaluation
from tests.unit.shared.test_metrics import metrics

NO_GROUPS = Collected(filled=(), groups=())
NO_BATCH = StepBatch(samples=(), idle=(), idle_groups=0, replaced=0, on_policy=True, response_tokens=0, updates=1)
NO_RESULT = StepResult()


class Whole:
    """Nothing to check, nothing to compact; a state that is only its totals."""

    def check(self) -> None: ...

    def after_checkpoint(self, step: int) -> None: ...

    def to_save(self, step: int, totals: RunTotals) -> Checkpoint:
        self.totals = totals
        return Checkpoint(step=step, files={"a": b"%d" % step})


class Start:
    """The files of one start of a run."""

    def __init__(self, path: Path, best: Best | None = None, actors: Callable[[], ActorsReport] = ActorsReport) -> None:
        run = RunDir(path) if path.exists() else RunDir.create(path, config_to_json(Config()))
        self.store = CheckpointStore(run.checkpoints, keep=1)
        self.whole: Any = Whole()
        parts = (LogConfig(), self.whole, self.store, self.whole, self.whole, spelled_words())
        self.files = RunFiles(run, *parts, best, actors=actors)

    def step(self, step: int, share: float | None) -> None:
        """A checkpoint, and its evaluation."""
        self.files.checkpoint(step, RunTotals())
        if share is not None:
            found = toy_evaluation([i < 10 * share for i in range(10)], version=step)
            self.files.note(found, may_be_best=True)


def test_the_highest_held_out_score_is_kept_and_the_later_of_two_equals(tmp_path: Path) -> None:
    start = Start(tmp_path / "run")
    for step, share in ((10, 0.5), (20, 0.7), (30, 0.7), (40, 0.6), (50, None)):
        start.step(step, share)
    assert start.store.load_best().step == 30
    assert sorted(path.name for path in start.store.path(1).parent.glob("step-*")) == ["step-000030", "step-000050"]
    assert start.whole.totals == RunTotals(best=Best(step=30, accuracy=0.7))


def test_a_later_life_goes_on_from_what_its_checkpoint_says(tmp_path: Path) -> None:
    first = Start(tmp_path / "run")
    first.step(10, 0.9)
    first.step(20, 0.5)
    second = Start(tmp_path / "run", best=first.whole.totals.best)
    second.step(30, 0.6)
    assert second.store.load_best().step == 10
    # What the next checkpoint would say, and what the first start would have said there.
    assert second.files.best == Best(step=10, accuracy=0.9)


def test_the_rows_after_an_evaluation_show_it_one_each(tmp_path: Path) -> None:
    start = Start(tmp_path / "run")
    for version, best in ((0, False), (10, True)):
        start.files.note(toy_evaluation([True, False], version=version, wall_s=2.5), may_be_best=best)
    for step in (11, 12, 13):
        start.files.step(step - 1, metrics(step), NO_GROUPS, NO_BATCH, NO_RESULT)
    rows = [json.loads(line) for line in start.files.run.metrics.read_text().splitlines()]
    assert [row.get("eval/step") for row in rows] == [0, 10, None]
    assert (rows[1]["eval/greedy"], rows[1]["eval/wall_s"]) == (0.5, 2.5)
    assert start.files.best == Best(step=10, accuracy=0.5)


def test_a_checkpoint_that_waits_for_its_evaluation_stays(tmp_path: Path) -> None:
    start = Start(tmp_path / "run")
    start.step(10, 0.5)
    start.files.keep({20})
    for step in (20, 30, 40):
        start.step(step, None)
    assert sorted(start.files.adapters()) == []
    kept = [path.name for path in start.store.path(1).parent.glob("step-*")]
    assert sorted(kept) == ["step-000010", "step-000020", "step-000040"]
    start.files.keep(())
    start.step(50, None)
    assert not start.store.path(20).exists()


def test_an_adapter_has_the_digest_that_its_manifest_says(tmp_path: Path) -> None:
    files = Start(tmp_path / "run").files
    files.checkpoints.save(Checkpoint(step=10, files={ADAPTER: b"weights"}))
    assert files.adapter(10) == files.adapters()[10] == hashlib.sha256(b"weights").hexdigest()
    files.checkpoints.save(Checkpoint(step=20, files={"a": b"20"}), keep_also=[10])
    (files.checkpoints.path(10) / "MANIFEST.json").write_text("damaged")
    assert (files.adapter(10), files.adapter(20), files.adapter(30), files.adapters()) == ("", "", "", {})


def test_a_new_evaluation_changes_when_one_was_written_last(tmp_path: Path) -> None:
    files = Start(tmp_path / "run").files
    files.run.eval.mkdir(exist_ok=True)
    os.utime(files.run.eval, ns=(0, 0))
    assert files.written_at() == 0
    for label in ("base", "base"):
        files.write_evaluation(toy_evaluation([True], label=label))
        assert files.written_at() > 0
        os.utime(files.run.eval, ns=(0, 0))
    shutil.rmtree(files.run.eval)
    assert files.written_at() == 0, "a folder that somebody removed ends no run"


def test_an_evaluation_that_a_row_shows_is_not_shown_again(tmp_path: Path) -> None:
    first = Start(tmp_path / "run")
    first.files.note(toy_evaluation([True], version=10), may_be_best=True)
    first.files.step(10, metrics(11), NO_GROUPS, NO_BATCH, NO_RESULT)
    second = Start(tmp_path / "run")
    second.files.resume_at(12)
    second.files.note(toy_evaluation([True], version=10), may_be_best=True)
    second.files.note(toy_evaluation([True], version=8), may_be_best=True)
    second.files.step(11, metrics(12), NO_GROUPS, NO_BATCH, NO_RESULT)
    rows = [json.loads(line) for line in second.files.run.metrics.read_text().splitlines()]
    assert [row.get("eval/step") for row in rows] == [10, 8]


def test_what_actors_did_is_in_the_row_and_in_the_summary(tmp_path: Path) -> None:
    figures = ActorFigures(tokens_per_s=120.5, waiting=0.25, faults=1, version=3)
    reports = [ActorsReport(actors={"actor0": figures, "gpu-box": figures}, limited={"link.credits": 0.5})]
    start = Start(tmp_path / "run", actors=reports.pop)
    start.files.step(10, metrics(11), NO_GROUPS, NO_BATCH, NO_RESULT)
    (row,) = [json.loads(line) for line in start.files.run.metrics.read_text().splitlines()]
    found = {key: value for key, value in row.items() if key.startswith(("actors/gpu-box", "limited/"))}
    assert found == {
        "actors/gpu-box/tokens_per_s": 120.5,
        "actors/gpu-box/waiting": 0.25,
        "actors/gpu-box/faults": 1.0,
        "actors/gpu-box/version": 3.0,
        "limited/link.credits": 0.5,
    }
    assert start.files.reported.actors["actor0"] == figures


def test_a_step_that_is_judged_again_replaces_itself() -> None:
    assert better(Best(step=4, accuracy=0.9), Best(step=4, accuracy=0.5)) == Best(step=4, accuracy=0.5)
