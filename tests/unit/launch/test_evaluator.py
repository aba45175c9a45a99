"""What is evaluated beside a run: what is missing, each once, and when the run has ended."""

from pathlib import Path
from typing import Any

import pytest

from launch.commands.evaluate import evaluators_lease
from launch.evaluator.command import follow_run
from launch.evaluator.follow import CheckpointFollower, Ending, alone
from learner.durable.checkpoint import Checkpoint, CheckpointStore
from learner.durable.state import ADAPTER
from shared.config.load import config_to_json
from shared.config.processes import ActorConfig, ComputeConfig, EvalConfig
from shared.config.tree import Config
from shared.errors import ConfigError, RunDirError
from shared.model.adapter_file import digest
from shared.process.lease import NoLease
from shared.run.evaluation import Evaluation, read_evaluation, write_evaluation
from shared.run.run_dir import RunDir
from shared.run.summary import Status, Summary, read_summary, write_summary
from tests.support.fakes import toy_evaluation

BASE = b"what the run begins with"


class ToyEvaluator:
    """Of the tasks, as many are right as the adapter has bytes."""

    tasks_sha256 = "tasks of 40"

    def run(self, label: str, version: int, adapter: bytes) -> Evaluation:
        right = [index < len(adapter) for index in range(40)]
        return toy_evaluation(right, label=label, version=version, adapter_sha256=digest(adapter))


class Fixture:
    """A run of 8 steps, with evaluations every 2."""

    def __init__(self, path: Path) -> None:
        self.run = RunDir.create(path, config_to_json(Config()))
        self.store = CheckpointStore(self.run.checkpoints, keep=9)
        self.told: list[str] = []

    def save(self, *steps: int, size: int = 0) -> None:
        """The adapter grows with the step."""
        for step in steps:
            self.store.save(Checkpoint(step=step, files={ADAPTER: b"a" * (size or step)}))

    def follower(self, every: int = 2) -> CheckpointFollower:
        evaluation = EvalConfig(every=every, beside=every > 0)
        evaluator: Any = ToyEvaluator()
        return CheckpointFollower(self.run, evaluation, 8, 9, BASE, evaluator)

    def follow(self, every: int = 2) -> list[str]:
        """What is evaluated until nothing is missing."""
        self.told.clear()
        self.follower(every).follow(lambda: True, lambda: None, self.told.append)
        return [line.partition(":")[0] for line in self.told]

    def summary(self, status: Status) -> None:
        write_summary(self.run, Summary(status=status, steps=8, wall_s=1.0, adapter_sha256="ab" * 32))


@pytest.fixture
def made(tmp_path: Path) -> Fixture:
    return Fixture(tmp_path / "run")


def test_each_checkpoint_that_is_due_is_evaluated_once(made: Fixture) -> None:
    made.save(1, 2, 3, 4)
    assert made.follow() == ["base", "step-000002", "step-000004"]
    assert made.follow() == []
    made.save(6, 8)
    assert made.follow() == ["step-000006", "final"]
    assert made.follow(every=0) == ["step-000001", "step-000003"], "all of them"


def test_another_adapter_or_other_tasks_are_evaluated_again(made: Fixture) -> None:
    made.save(2, 8)
    made.follow()
    made.save(2, size=9)
    write_evaluation(made.run.eval, toy_evaluation([True], label="final", version=8, adapter_sha256=digest(b"a" * 8)))
    assert made.follow() == ["step-000002", "final"]


def test_a_checkpoint_that_cannot_be_read_stops_nobody(made: Fixture) -> None:
    made.save(2, 4)
    (made.store.path(2) / ADAPTER).write_bytes(b"damaged")
    assert made.follow() == ["base", "step-000004"]


def test_what_comes_while_it_waits_is_evaluated_before_it_ends(made: Fixture) -> None:
    answers = iter([False, False, True])
    told: list[str] = []
    made.follower().follow(lambda: next(answers), lambda: made.save(2, 4), told.append)
    assert [line.partition(":")[0] for line in told] == ["base", "step-000002", "step-000004"]
    assert list(answers) == []


def test_at_the_end_the_best_checkpoint_and_the_summary_know_every_result(made: Fixture) -> None:
    made.save(2, 4, 6, 8)
    made.save(4, size=30)
    made.save(6, size=30)
    made.summary("done")
    made.follow()
    made.follower().settle()
    assert made.store.load_best().step == 6, "the later of two equals"
    found = read_summary(made.run)
    assert found and set(found.eval) == {"base", "final"} and found.eval["final"].version == 8
    final = read_evaluation(made.run.eval / "final.json")
    assert final and found.eval["final"].greedy == final.greedy


def test_a_former_end_of_the_run_may_be_the_best_checkpoint(made: Fixture) -> None:
    made.save(2, 8)
    made.save(5, size=30)
    assert made.follow() == ["base", "step-000002", "final"]
    write_evaluation(made.run.eval, ToyEvaluator().run("step-000005", 5, b"a" * 30))
    made.follower().settle()
    assert made.store.load_best().step == 5


def test_a_run_has_ended_when_its_learner_is_gone_and_its_summary_says_so(made: Fixture) -> None:
    made.summary("running")
    with made.run.locked():
        assert not Ending(made.run)() and made.run.is_in_use()
    ending = Ending(made.run)
    assert not ending(), "it may not have begun"
    assert ending.free_since > 0
    ending.free_since -= 31
    assert ending()
    made.summary("stopped")
    with made.run.locked():
        assert not Ending(made.run)(), "it goes on"
    assert Ending(made.run)()


def test_where_servers_sample_no_card_is_taken_or_needed(made: Fixture) -> None:
    actor, compute = ActorConfig(engine="vllm_server"), ComputeConfig(device="cuda")
    assert isinstance(evaluators_lease(actor, compute, made.run), NoLease)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"problems": 16}, "got --problems;"),
        ({"long_cap": 64, "samples": 8}, "got --long-cap, --samples;"),
        ({"test": True}, "got --test;"),
    ],
)
def test_one_that_follows_takes_no_other_tasks_or_draws(made: Fixture, given: dict[str, int], named: str) -> None:
    options = {"problems": None, "test": False} | given
    with pytest.raises(ConfigError, match=named):
        follow_run(directory=made.run.path, options=options)


def test_one_process_at_a_time_follows_a_run(made: Fixture) -> None:
    with alone(made.run), pytest.raises(RunDirError, match="is being evaluated by process"), alone(made.run):
        pass
    with alone(made.run):
        pass
