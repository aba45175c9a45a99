"""A checkpoint holds everything: what is loaded continues as what was saved would have."""

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from learner.curriculum.curriculum import Shuffled
from learner.durable.checkpoint import Checkpoint, CheckpointStore
from learner.durable.recorder import RecordedOrders
from learner.durable.state import (
    Best,
    LearnerState,
    RunTotals,
    refuse_other_tasks,
    trained_system,
    write_task_digests,
)
from learner.objective.batch import StepBatch
from learner.orders.plan import StepPlan
from learner.quarantine.guard import Guard
from learner.quarantine.quarantine import keep_nowhere
from learner.tasks.tasks import TaskSet
from learner.update.budget import Size
from learner.update.mismatch import BF16, Gap, Gate
from learner.update.publisher import Publisher
from protocol.messages import Group
from shared.config.data import TasksConfig
from shared.config.model import LoraConfig
from shared.config.processes import PipelineConfig
from shared.config.tree import Config, OptimizerConfig, RunConfig
from shared.errors import ConfigError, DamageError, DataError
from shared.model.adapter_file import adapter_bytes, adapter_config
from shared.model.policy import Policy
from shared.run.run_dir import RunDir
from tests.support.fakes import RANK, tiny_group, tiny_policy, toy_tasks
from tests.support.steps import step_batch, teaching_samples, trainer_of

pytestmark = pytest.mark.usefixtures("one_thread")

CONFIG = Config(
    run=RunConfig(steps=10),
    lora=LoraConfig(rank=RANK, alpha=2.0 * RANK),
    optimizer=OptimizerConfig(lr=1e-2, weight_decay=0.1),
    pipeline=PipelineConfig(max_lag=2),
)


class Learner:
    """A policy and its state, without loop or actor."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        publisher = Publisher(policy.adapter)
        publisher.snapshot(version=0)
        trainer = trainer_of(policy, CONFIG)
        self.update, self.budget = trainer.update, trainer.budget
        plan = StepPlan(CONFIG, toy_tasks(12), Shuffled(12, seed=0), RecordedOrders([]))
        optimizer, norms = self.update.optimizer, self.update.norms
        self.guard = Guard(self.update, CONFIG.guard, b"", keep_nowhere)
        self.state = LearnerState(
            CONFIG.run.seed,
            adapter_config(CONFIG.lora, CONFIG.model.path),
            publisher,
            optimizer,
            norms,
            plan,
            self.guard,
            self.update.gate,
            self.budget,
            policy.base_digest,
        )

    def step(self, step: int) -> bytes:
        """One update on made-up groups, published; the adapter afterwards."""
        assert self.update.apply(step, batch(step))
        self.state.publisher.snapshot(step + 1)
        return adapter_bytes(self.policy.adapter)


def batch(step: int) -> StepBatch:
    groups: list[Group] = [
        tiny_group([1.0, 0.0, 0.0], [3, 5, 2], group_id=f"train/{step:06d}/{slot:04d}", seed=10 * step + slot)
        for slot in range(3)
    ]
    return step_batch(teaching_samples(groups, CONFIG), 0, CONFIG)


@pytest.fixture
def learner(checkpoint: Path) -> Callable[[], Learner]:
    return lambda: Learner(tiny_policy(checkpoint, lora=CONFIG.lora))


def test_what_is_loaded_makes_the_next_updates_bit_for_bit(learner: Callable[[], Learner], tmp_path: Path) -> None:
    first, second = learner(), learner()
    for step in range(3):
        first.step(step)
    first.state.plan.order_ahead(version=3)
    store = CheckpointStore(tmp_path, keep=3)
    totals = RunTotals(wall_s=12.5, best=Best(step=2, accuracy=1 / 3))
    first.guard.skips = 2
    first.budget.begin(Size(tokens=300, rows=70))
    first.budget.end()
    store.save(first.state.to_save(3, totals))
    loaded = store.load_latest()
    assert loaded is not None
    assert second.state.load(loaded) == totals
    assert adapter_bytes(second.policy.adapter) == adapter_bytes(first.policy.adapter)
    for step in range(3, 6):
        assert first.step(step) == second.step(step)
    assert first.state.optimizer.state_bytes() == second.state.optimizer.state_bytes()
    assert first.state.norms.state_dict() == second.state.norms.state_dict()
    assert first.guard.skips == second.guard.skips == 2
    assert len(second.state.norms.recent) == 6
    assert second.budget.now == Size(tokens=300, rows=70) and vars(second.budget) == vars(first.budget)


def test_position_pending_steps_and_versions_come_back(learner: Callable[[], Learner]) -> None:
    first, second = learner(), learner()
    first.state.plan.order_ahead(version=0)
    for step in range(3):
        first.step(step)
    first.state.publisher.forget_before(1)
    second.state.load(first.state.to_save(3, RunTotals()).copied())
    assert second.state.plan.state_dict() == first.state.plan.state_dict()
    assert [entry[0] for entry in second.state.plan.state_dict()["pending"]] == [0, 1, 2]
    versions = first.state.publisher.versions
    assert {v: p.sha256 for v, p in second.state.publisher.versions.items()} == {
        v: versions[v].sha256 for v in (1, 2, 3)
    }
    for version, restored in second.state.publisher.versions.items():
        assert restored.file == versions[version].file == restored.message.adapter.tobytes()


def test_the_limits_of_the_gate_come_back(learner: Callable[[], Learner]) -> None:
    first, second, raised, restored = learner(), learner(), Gate(0.0, BF16), Gate(0.0, BF16)
    raised.limits = BF16.at_least(Gap(mean=0.02, p95=0.05, p99=0.1, largest=0.2))
    first.state.gate, second.state.gate = raised, restored
    second.state.load(first.state.to_save(0, RunTotals()).copied())
    assert restored.limits == raised.limits != BF16


def test_a_checkpoint_has_the_files_that_other_tools_read(learner: Callable[[], Learner]) -> None:
    saved = learner()
    saved.step(0)
    files = saved.state.to_save(1, RunTotals(wall_s=3.0)).copied().files
    assert set(files) == {
        "adapter_model.safetensors",
        "adapter_config.json",
        "optimizer.safetensors",
        "policy-000000.safetensors",
        "state.json",
    }
    assert files["adapter_model.safetensors"] == adapter_bytes(saved.policy.adapter)
    facts = json.loads(files["state.json"])
    assert facts["adapter_sha256"] == saved.state.publisher.versions[1].sha256
    assert (facts["step"], facts["versions"], facts["wall_s"]) == (1, [0, 1], 3.0)
    assert json.loads(files["adapter_config.json"])["r"] == RANK


def test_saving_is_a_function_of_the_state(learner: Callable[[], Learner]) -> None:
    first, second = learner(), learner()
    first.step(0)
    second.step(0)
    assert first.state.to_save(1, RunTotals()).copied().files == second.state.to_save(1, RunTotals()).copied().files


def test_a_checkpoint_of_another_base_is_refused_and_changes_nothing(learner: Callable[[], Learner]) -> None:
    saved, other = learner(), learner()
    saved.step(0)
    checkpoint = saved.state.to_save(1, RunTotals()).copied()
    facts = json.loads(checkpoint.files["state.json"]) | {"base_digest": "f" * 64}
    foreign = Checkpoint(step=1, files={**checkpoint.files, "state.json": json.dumps(facts).encode()})
    before = adapter_bytes(other.policy.adapter)
    with pytest.raises(DamageError, match=r"step 1 belongs to another base model \(ffffffffffff, here [0-9a-f]{12}\)"):
        other.state.load(foreign)
    assert adapter_bytes(other.policy.adapter) == before


def test_another_seed_than_the_run_began_with_is_refused(learner: Callable[[], Learner]) -> None:
    saved = learner()
    saved.step(0)
    checkpoint = saved.state.to_save(1, RunTotals()).copied()
    other = learner()
    other.state.seed = 7
    with pytest.raises(ConfigError, match=r"^run\.seed is 7 in .*, but .* began with 0; set it back to 0, or"):
        other.state.load(checkpoint)


@pytest.mark.parametrize(
    "lost", ["seed", "gate", "budget", "norms", "plan", "versions", "wall_s", "best", "base_digest"]
)
def test_a_checkpoint_without_a_key_is_damage_in_words(learner: Callable[[], Learner], lost: str) -> None:
    saved = learner()
    saved.step(0)
    checkpoint = saved.state.to_save(1, RunTotals()).copied()
    facts = json.loads(checkpoint.files["state.json"])
    del facts[lost]
    bare = Checkpoint(step=1, files={**checkpoint.files, "state.json": json.dumps(facts).encode()})
    with pytest.raises(DamageError, match=rf"^The checkpoint of step 1 has no '{lost}'; .*version of Tandem"):
        learner().state.load(bare)


def test_a_checkpoint_without_a_file_is_damage_in_words(learner: Callable[[], Learner]) -> None:
    saved = learner()
    saved.step(0)
    checkpoint = saved.state.to_save(1, RunTotals()).copied()
    for lost in checkpoint.files.keys() - {"adapter_config.json"}:
        bare = Checkpoint(step=1, files={name: data for name, data in checkpoint.files.items() if name != lost})
        with pytest.raises(DamageError, match=rf"^The checkpoint of step 1 has no '{lost}'; "):
            learner().state.load(bare)


def test_an_adapter_of_another_rank_is_refused(learner: Callable[[], Learner], checkpoint: Path) -> None:
    saved = learner()
    saved.step(0)
    wider = Learner(tiny_policy(checkpoint, lora=msgspec.structs.replace(CONFIG.lora, rank=2 * RANK)))
    with pytest.raises(DamageError, match="the model needs"):
        wider.state.load(saved.state.to_save(1, RunTotals()).copied())


def task_set(train: int = 12, held_out: int = 3, *, answers: int = 0) -> TaskSet:
    learnt = tuple(np.array([n], dtype=np.int32) for n in range(answers))
    of_run = toy_tasks(train), toy_tasks(held_out, first=50)
    return TaskSet(train=tuple(of_run[0]), held_out=tuple(of_run[1]), dropped={"of no use": train}, answers=learnt)


def changed(tasks: TaskSet) -> TaskSet:
    """The same with another gold answer."""
    first, *others = tasks.train
    return replace(tasks, train=(replace(first, columns=first.columns | {"answer": "another"}), *others))


def test_a_run_goes_on_with_the_tasks_that_it_began_with_wherever_it_is(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    write_task_digests(run, task_set().digests())
    refuse_other_tasks(run, task_set().digests())
    moved = tmp_path / "moved"
    moved.mkdir()
    (tmp_path / "tasks.json").rename(moved / "tasks.json")
    refuse_other_tasks(RunDir(moved), replace(task_set(), dropped={}).digests())


@pytest.mark.parametrize(
    ("now", "words"),
    [
        (task_set(11), r"12 training tasks \(sha256 [0-9a-f]{12}\), now 11 \([0-9a-f]{12}\): its data"),
        (changed(task_set()), r"12 training tasks \(sha256 [0-9a-f]{12}\), now 12 \([0-9a-f]{12}\): its data"),
        (replace(task_set(), train=task_set().train[::-1]), r"12 training tasks .*, now 12 "),
        (task_set(answers=1), r"12 training tasks .*, now 12 "),
        (task_set(held_out=4), r"3 held-out tasks \(sha256 [0-9a-f]{12}\), now 4 "),
        (task_set(11, 2), r"12 training tasks .*, now 11 .* and 3 held-out tasks .*, now 2 "),
    ],
)
def test_other_tasks_are_refused_in_one_sentence(now: TaskSet, words: str, tmp_path: Path) -> None:
    write_task_digests(RunDir(tmp_path), task_set().digests())
    with pytest.raises(DataError, match=rf" began with {words}.*put them back, or begin a new run") as caught:
        refuse_other_tasks(RunDir(tmp_path), now.digests())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("systems", "found"), [(("A",), "A"), (("",), ""), (("A", ""), None), ((), "given")])
def test_the_system_message_that_a_run_trained_with(
    systems: tuple[str, ...], found: str | None, tmp_path: Path
) -> None:
    run, tasks = RunDir(tmp_path), TasksConfig(system_prompt="given")
    assert trained_system(run, tasks) == "given"
    write_task_digests(run, replace(task_set(), systems=systems).digests())
    assert trained_system(run, tasks) == found
    run.tasks.write_text("{")
    assert trained_system(run, tasks) == "given"


@pytest.mark.parametrize("written", [None, b"", b"{", b'{"train": 12}'])
def test_a_run_that_does_not_say_what_its_tasks_were_is_refused(written: bytes | None, tmp_path: Path) -> None:
    if written is not None:
        (tmp_path / "tasks.json").write_bytes(written)
    with pytest.raises(DamageError, match=r"tasks\.json cannot be read .*; restore it from a copy, or begin a new run"):
        refuse_other_tasks(RunDir(tmp_path), task_set().digests())


def test_the_digest_of_many_tasks_takes_a_moment() -> None:
    tasks = task_set(2000)
    many = replace(tasks, train=tasks.train * 50)
    start = time.process_time()
    assert many.digests().train == 100_000
    assert time.process_time() - start < 5.0
