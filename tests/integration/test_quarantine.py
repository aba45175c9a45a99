"""A batch that must not be applied, on the real model in one process: quarantined, the same in every start of a run."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from actor.rollout import Rollout
from actor.wiring import build_engine
from launch.commands.in_process import LocalFiller
from launch.commands.replay import replay_batch
from launch.presets.load import load_config
from learner.durable.checkpoint import CheckpointStore
from learner.durable.journal import Journal
from learner.durable.recorder import Compaction, JournalRecorder
from learner.durable.state import RunTotals
from learner.loop import train
from learner.quarantine.quarantine import KeptBatch, read_batch, write_batch
from learner.quarantine.reproduce import Reproduction, reproduce
from learner.reports.run_files import RunFiles
from learner.reports.step_report import StepReport
from learner.update.gradient_check import NumericalFault
from learner.wiring import build_learner, build_trainer, load_model, load_trained_policy
from protocol.messages import FilledOrder, Group, Order
from shared.base.checksum import BaseChecksum, frozen_sums, frozen_tensors
from shared.config.load import config_from_json, config_to_json
from shared.config.tree import Config
from shared.errors import DamageError, TrainingStopped
from shared.process.lease import NoLease
from shared.run.run_dir import RunDir
from tests.support.fakes import ScriptedScorer, spelled_words
from tests.support.steps import judge_of, never_stepped

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = (
    "run.steps=6",
    "rollout.prompts=3",
    "rollout.group=4",
    "rollout.max_new_tokens=12",
    "rollout.temperature=1.5",
    "reward.advantage=mean",
    "optimizer.lr=0.002",
    "eval.problems=0",
    "checkpoint.every=2",
    "compute.learner_threads=1",
    "compute.actor_threads=1",
)
GUILTY = "train/000002/0001"
Spoil = Callable[[Group], Group]


def no_number(group: Group) -> Group:
    """One log-prob of sample 2 is NaN: no actor's message could carry it, a journal can."""
    logprobs = group.logprobs.copy()
    logprobs[sum(group.lengths[:2])] = np.nan
    return msgspec.structs.replace(group, logprobs=logprobs, scores=(0.0, 0.0, 1.0, 0.0))


def huge_score(group: Group) -> Group:
    """What the wire allows, and no gradient survives."""
    return msgspec.structs.replace(group, scores=(0.0, 0.0, 1e9, 0.0))


class SpoiledFiller(LocalFiller):
    """Orders filled here, but for one group's numbers. From step `since` on, every step's second group."""

    def __init__(self, rollout: Rollout, spoil: Spoil, always: bool) -> None:
        super().__init__(rollout)
        self.spoil = spoil
        self.always = always

    def submit(self, orders: Iterable[Order]) -> None:
        for order in orders:
            super().submit([order])
            filled_order = self.filled[order.order_id]
            groups = tuple(self.spoil(group) if self.guilty(group) else group for group in filled_order.groups)
            self.filled[order.order_id] = msgspec.structs.replace(filled_order, groups=groups)

    def guilty(self, group: Group) -> bool:
        return group.group_id.endswith(GUILTY[-5:]) if self.always else group.group_id == GUILTY


class Start:
    """One start of a run: from its newest checkpoint, if there is one."""

    def __init__(self, path: Path, config: Config, spoil: Spoil = no_number, always: bool = False) -> None:
        self.config = config
        run = RunDir(path) if path.exists() else RunDir.create(path, config_to_json(config))
        model = load_model(config)
        engine, prompter = build_engine(config)
        scorer = ScriptedScorer(lambda ids: sum(ids) % 2 == 0)
        self.policy = model.policy
        self.filler = SpoiledFiller(Rollout(engine, scorer, NoLease(), prompter.text), spoil, always)
        learner = build_learner(model, self.filler, lambda batch: write_batch(run.quarantine, batch))
        self.state, self.guard = learner.state, learner.guard
        store = CheckpointStore(run.checkpoints, keep=10)
        checkpoint = store.load_latest()
        self.first = checkpoint.step if checkpoint else 0
        totals = self.state.load(checkpoint) if checkpoint else RunTotals()
        for version in self.state.publisher.versions.values():
            self.filler.publish(version.message, oldest_needed=0)
        self.state.plan.submit_pending()
        recorder = JournalRecorder(Journal.open(run.journal), self.first, admit=lambda group: None)
        compaction = Compaction(config.journal, store, recorder)
        base = BaseChecksum(lambda: frozen_sums(model.policy))
        files = RunFiles(run, config.log, self.state, store, compaction, base, spelled_words())
        files.resume_at(self.first + 1)
        report = StepReport(config, files, totals, lambda: False, self.state.plan.curriculum.metrics)
        self.parts = learner.parts(report, NoLease())
        self.shas = {version: policy.sha256 for version, policy in self.state.publisher.versions.items()}

    def train(self, last: int | None = None) -> str:
        """Digest of the adapter at the end."""
        last = last or self.config.run.steps
        train(self.parts, self.first, last)
        return self.state.publisher.versions[last].sha256


def config_with(*sets: str) -> Config:
    return load_config("embedded", (*SMALL, *sets))


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def adapter_of(path: Path, step: int) -> str:
    return json.loads((path / f"checkpoints/step-{step:06d}/state.json").read_text())["adapter_sha256"]


FILE = "quarantine/step-000003.safetensors"


@pytest.mark.parametrize(("spoil", "kind"), [(no_number, "not finite"), (huge_score, "spike")])
def test_the_run_stops_before_the_step_and_the_file_alone_gives_the_fault_again(
    run_path: Path, capsys: pytest.CaptureFixture[str], spoil: Spoil, kind: str
) -> None:
    start = Start(run_path, config_with("guard.grad_norm_limit=1000"), spoil)
    with pytest.raises(TrainingStopped) as caught:
        start.train()
    said = str(caught.value)
    assert said.startswith("Step 3: ") and f"the suspect is sample {GUILTY}[2] (alone:" in said
    assert f"`python -m launch replay --batch {run_path}/{FILE}`" in said
    assert f"`python -m launch resume {run_path} --on-fault skip`" in said
    assert [row["step"] for row in rows(run_path)] == [1, 2]
    assert max(start.state.publisher.versions) == 2
    kept = read_batch(run_path / FILE)
    assert (kept.step, kept.kind, kept.sample) == (2, kind, f"{GUILTY}[2]")
    # Nothing else of the run is needed.
    (run_path / FILE).rename(run_path.parent / "alone.safetensors")
    assert replay_batch(file=run_path.parent / "alone.safetensors") == 0
    out = capsys.readouterr().out.splitlines()
    report = json.loads(out[-1])
    assert report["reproduced"] and report["kind"] == kind and report["step"] == 3
    assert (report["group"], report["sample"]) == (GUILTY, f"{GUILTY}[2]")
    assert report["first"]["where"] == ("batch" if kind == "not finite" else "gradient")
    assert sum(line.endswith("<-- suspect") for line in out) == 1


def test_a_step_of_several_updates_shows_all_its_samples(run_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start = Start(run_path, config_with("guard.grad_norm_limit=1000", "batch.updates=2"), huge_score)
    with pytest.raises(TrainingStopped):
        start.train()
    assert replay_batch(file=run_path / FILE) == 0
    out = capsys.readouterr().out
    assert all(f"train/000002/{slot:04}[0]" in out for slot in (0, 1))


@pytest.mark.long
def test_without_the_batch_every_life_of_the_run_ends_in_the_same_bits(run_path: Path, tmp_path: Path) -> None:
    config = config_with("guard.on_fault=skip")
    whole = Start(run_path, config).train()
    assert [row["groups/quarantined"] for row in rows(run_path)] == [0, 0, 3, 0, 0, 0]
    assert rows(run_path)[2]["grad_norm"] is None and rows(run_path)[3]["grad_norm"] is not None
    # A run that is killed after each of these steps and goes on from its last checkpoint.
    broken = tmp_path / "broken"
    for last in (1, 3, 4, 5):
        Start(broken, config).train(last)
    assert Start(broken, config).train() == whole
    assert read_batch(broken / FILE).position == read_batch(run_path / FILE).position
    # The step itself changed nothing.
    assert adapter_of(run_path, 2) != adapter_of(run_path, 4)
    third = Start(tmp_path / "third", config_with("guard.on_fault=skip", "checkpoint.every=1"))
    third.train(3)
    assert adapter_of(tmp_path / "third", 2) == adapter_of(tmp_path / "third", 3)


def test_a_spike_is_judged_by_the_norms_of_earlier_lives(run_path: Path, tmp_path: Path) -> None:
    """Two norms make a window here; after the restart the first two steps' norms come from the checkpoint alone."""
    config = config_with("guard.on_fault=skip", "guard.spike_factor=100", "guard.spike_window=2")
    whole = Start(run_path, config, huge_score).train()
    assert [row["groups/quarantined"] for row in rows(run_path)] == [0, 0, 3, 0, 0, 0]
    Start(tmp_path / "broken", config, huge_score).train(2)
    assert Start(tmp_path / "broken", config, huge_score).train() == whole


def test_several_passes_are_taken_back_together(run_path: Path, tmp_path: Path) -> None:
    """The first pass over the batch is harmless and applied; the second goes beyond the limit."""
    open_clip = ("loss.clip_low=1", "loss.clip_high=1e9")
    config = config_with("loss.passes=2", "optimizer.lr=0.1", *open_clip, "guard.on_fault=skip", "checkpoint.every=1")
    undisturbed = Start(tmp_path / "undisturbed", config, lambda group: group)
    undisturbed.train(1)
    first, second = undisturbed.state.norms.recent
    limit = (first + second) / 2
    assert first < limit < second, "this test needs a second pass with the larger gradient"
    start = Start(run_path, msgspec.structs.replace(config, guard=guard_with(config, limit)), lambda group: group)
    before = start.state.publisher.versions[0].sha256
    assert start.train(1) == before
    assert never_stepped(start.state.optimizer) and not start.state.norms.recent
    found = reproduced(kept := read_batch(run_path / "quarantine/step-000001.safetensors"))
    assert found.fault is not None and found.fault.suspect.sample == kept.sample


def reproduced(kept: KeptBatch) -> Reproduction:
    config = config_from_json(kept.config)
    trainer = build_trainer(load_trained_policy(config, "cpu"), config, lambda: None)
    return reproduce(kept, judge_of(config), trainer.batches, trainer.update)


def guard_with(config: Config, limit: float) -> Any:
    return msgspec.structs.replace(config.guard, grad_norm_limit=limit)


@pytest.mark.long
def test_nothing_but_faults_ends_the_run(run_path: Path) -> None:
    start = Start(run_path, config_with("guard.on_fault=skip", "guard.skips_in_a_row=2"), always=True)
    with pytest.raises(TrainingStopped, match=r"Step 3: .*one more in a row than guard\.skips_in_a_row = 2"):
        start.train()
    # Counted over starts: the checkpoint knows of the two before.
    again = Start(run_path, start.config, always=True)
    assert again.first == 2 and again.guard.skips == 2
    with pytest.raises(TrainingStopped, match="Step 3"):
        again.train()


def test_a_weight_that_overflows_is_found_though_no_batch_is_to_blame(run_path: Path) -> None:
    """As a bit that flips in memory would make it: a finite weight, far too large."""
    start = Start(run_path, config_with())
    name, parameter = next(iter(start.state.optimizer.parameters.items()))
    start.filler.spoil = lambda group: group
    start.train(2)
    start.first = 2
    parameter.data[0, 0] = float("inf")
    with pytest.raises(TrainingStopped, match=r"Step 3: .*not both finite") as caught:
        start.train()
    assert isinstance(caught.value.__cause__, NumericalFault)
    kept = read_batch(run_path / FILE)
    found = reproduced(kept)
    assert found.fault is not None and found.bad is not None
    assert (found.bad.where, found.bad.name) == ("adapter", name)
    assert not all(finding.finite for finding in found.findings)


def test_a_bit_that_flips_in_the_learners_base_is_found_before_a_checkpoint_holds_its_work(run_path: Path) -> None:
    undisturbed = Start(run_path.with_name("undisturbed"), config_with(), lambda group: group).train()
    start = Start(run_path, config_with(), lambda group: group)
    start.train(2)
    name, weight = list(frozen_tensors(start.policy))[-1]
    weight.flatten().view(torch.int32)[5] ^= 1
    start.first = 2
    with pytest.raises(DamageError, match=rf"base changed in memory: '{name}'"):
        start.train()
    assert sorted(p.name for p in (run_path / "checkpoints").iterdir()) == ["step-000002"]
    assert Start(run_path, config_with(), lambda group: group).train() == undisturbed


def test_a_changed_byte_of_the_file_is_found(run_path: Path, tmp_path: Path) -> None:
    with pytest.raises(TrainingStopped):
        Start(run_path, config_with()).train()
    data = (run_path / FILE).read_bytes()
    spoiled = tmp_path / "spoiled.safetensors"
    for place in (*range(0, 600, 7), *np.linspace(600, len(data) - 1, 60).astype(int).tolist()):
        changed = bytearray(data)
        changed[place] ^= 4
        spoiled.write_bytes(changed)
        with pytest.raises(DamageError, match=r"spoiled\.safetensors"):
            read_batch(spoiled)
    spoiled.write_bytes(data[:-1])
    with pytest.raises(DamageError):
        read_batch(spoiled)
    with pytest.raises(DamageError, match="cannot be read"):
        read_batch(tmp_path / "none")
    again = read_batch(run_path / FILE)
    assert [type(filled_order) for filled_order in again.filled] == [FilledOrder]
