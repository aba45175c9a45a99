"""What a tracker costs a training step: steps with one and steps without any, interleaved in one run.

    a round   none, trackio, none, wandb, none, tensorboard     each a block of steps, then the next round

Actor and learner compute in this process (local_run.py) and take turns as in a run; the learner's own writers write the
row and the rollouts of each step. A tracker is the process that a run starts, `python -m launch.tracking`, at its low
priority, on a run directory into which only the steps of its blocks are written. Outside of its blocks it is stopped
(SIGSTOP) with all its children, so that steps without a tracker are free of all three. Weights & Biases is offline,
trackio keeps its data here, and the policy stays as it is (a learning rate of 1e-9), so that all steps are alike.

    cost               mean step of a block, by the mean of the two blocks without a tracker around it, minus 1;
                       the mean over the blocks, with Student's 95 % interval
    processor time     of the tracker and all below it, for each of its steps; on a machine with an idle core it costs
                       a step nothing, so this is the most that it can cost
    start              the same before the first step: imports, once in a run

Left out: the network of Weights & Biases, which delays the tracker and not the run.

    PYTHONPATH=FOLDER python -m benchmarks.tracker_cost [--rounds 10] [--steps 24]      FOLDER: where the trackers are
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from msgspec import structs

from actor.engines.hf_engine import HFEngine
from actor.rollout import Rollout
from actor.wiring import allowed_difference, build_engine
from benchmarks.local_run import ParityScorer
from benchmarks.machine import write_result
from benchmarks.student import mean_interval
from benchmarks.trust_cost import milliseconds
from launch.commands.in_process import LocalFiller
from launch.presets.load import load_config
from launch.tracking.trackers import check_tracker
from learner.durable.state import RunTotals
from learner.loop import train
from learner.objective.batch import StepBatch
from learner.objective.judged import Collected
from learner.quarantine.quarantine import keep_nowhere
from learner.reports.rollout_log import RolloutLog, Words
from learner.reports.step_report import StepReport
from learner.update.figures import StepResult
from learner.wiring import build_learner, load_model
from shared.config.load import config_to_json
from shared.config.processes import TrackingConfig
from shared.config.tree import Config
from shared.model.prompt import Prompter
from shared.process.children import send, tree
from shared.process.lease import NoLease
from shared.process.parent_death import PARENT_PID
from shared.run.files import LineLog
from shared.run.metrics import MetricsLog, StepMetrics
from shared.run.run_dir import RunDir

KINDS = ("trackio", "wandb", "tensorboard")
NONE = "none"
WARM = 4
"""Steps that are written for every tracker before the first block, so that all of them have started."""
QUIET_S = 2.0
IDLE_CPU_S = 0.05
"""Processor time within QUIET_S of a tracker that has nothing to do."""
Block = tuple[str, float]
"""Who tracked it, and its mean step in seconds."""


class Arm:
    """A run directory, and the tracker that follows it, if any."""

    def __init__(self, kind: str, folder: Path, config: Config, prompter: Prompter) -> None:
        words = Words(text=prompter.text, spelled=prompter.as_the_model_sees)
        tracking = TrackingConfig(kind=kind)  # pyright: ignore[reportArgumentType]
        check_tracker(tracking)
        self.kind = kind
        run = RunDir.create(folder / kind, config_to_json(structs.replace(config, tracking=tracking)))
        self.metrics = MetricsLog(LineLog(run.metrics))
        self.rollouts = RolloutLog(LineLog(run.rollouts), config.log, words)
        self.tracker = None if kind == NONE else start_tracker(run, folder)
        self.steps = 0

    def write(
        self, step: int, metrics: StepMetrics, collected: Collected, batch: StepBatch, result: StepResult
    ) -> None:
        """As the learner does."""
        self.rollouts.log(step, collected, batch, result)
        self.metrics.log(metrics)
        self.steps += 1

    def processes(self) -> set[int]:
        return tree({self.tracker.pid}) if self.tracker else set()

    def stop(self) -> None:
        send(self.processes(), signal.SIGSTOP)

    def go_on(self) -> None:
        send(self.processes(), signal.SIGCONT)

    def cpu_s(self) -> float:
        return sum(map(cpu_seconds, self.processes()))

    def settle(self) -> None:
        """Returns when it has nothing more to do."""
        before = -1.0
        while self.cpu_s() - before > IDLE_CPU_S:
            before = self.cpu_s()
            time.sleep(QUIET_S)

    def end(self) -> None:
        self.go_on()
        if self.tracker:
            self.tracker.terminate()
            assert self.tracker.wait(120) == 0, f"the tracker {self.kind} failed"


def start_tracker(run: RunDir, folder: Path) -> "subprocess.Popen[bytes]":
    # It must not outlive this process, least of all stopped.
    tied = {PARENT_PID: str(os.getpid())}
    environment = os.environ | tied | {"WANDB_MODE": "offline", "TRACKIO_DIR": str(folder / "trackio-data")}
    with (run.logs / "tracker.log").open("wb") as log:
        argv = [sys.executable, "-m", "launch.tracking", "--run", str(run.path)]
        return subprocess.Popen(argv, env=environment, stdout=log, stderr=log, start_new_session=True)


def cpu_seconds(pid: int) -> float:
    """0 of a process that has just ended."""
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return times.user + times.system


@dataclass(frozen=True, kw_only=True)
class Counted:
    """Of a tracker."""

    start_s: float
    """Processor time before the first block."""
    steps_s: float
    """Processor time of all blocks."""
    steps: int
    """In these blocks."""


class Interleaved:
    """The files of a run whose blocks belong to one arm after the other."""

    def __init__(self, arms: Sequence[Arm], order: Sequence[str], block: int) -> None:
        self.arms = {arm.kind: arm for arm in arms}
        self.order = order
        self.block = block
        self.blocks: list[Block] = []
        self.started: dict[str, float] = {}
        self.done = 0
        self.begun = 0.0

    def step(self, step: int, metrics: StepMetrics, collected: Collected, batch: StepBatch, result: StepResult) -> None:
        """Warm-up first; then the row goes to the arm of the block."""
        if step < WARM:
            for arm in self.arms.values():
                arm.write(step, metrics, collected, batch, result)
            if step == WARM - 1:
                self.begin()
            return
        arm = self.arms[self.order[len(self.blocks)]]
        arm.write(step, metrics, collected, batch, result)
        self.done += 1
        if self.done == self.block:
            self.change(arm)

    def checkpoint(self, step: int, totals: RunTotals) -> None:
        """Not kept."""

    def begin(self) -> None:
        """All trackers have started and sent the warm-up; they sleep until it is their block."""
        for arm in self.arms.values():
            arm.settle()
            self.started[arm.kind] = arm.cpu_s()
            arm.stop()
            arm.steps = 0
        self.arms[self.order[0]].go_on()
        self.begun = time.perf_counter()

    def change(self, arm: Arm) -> None:
        """The block is over."""
        self.blocks.append((arm.kind, (time.perf_counter() - self.begun) / self.block))
        arm.stop()
        self.done = 0
        if len(self.blocks) < len(self.order):
            self.arms[self.order[len(self.blocks)]].go_on()
        self.begun = time.perf_counter()

    def counted(self, kind: str) -> Counted:
        """What it had not sent at the end of a block is sent now."""
        arm = self.arms[kind]
        arm.go_on()
        arm.settle()
        start = self.started[kind]
        return Counted(start_s=start, steps_s=arm.cpu_s() - start, steps=arm.steps)


def interleaved(rounds: int) -> list[str]:
    """Begins and ends without a tracker; each round starts with another one."""
    order = [NONE]
    for number in range(rounds):
        first = number % len(KINDS)
        order += [name for kind in (*KINDS[first:], *KINDS[:first]) for name in (kind, NONE)]
    return order


def train_interleaved(config: Config, folder: Path, order: Sequence[str], block: int) -> Interleaved:
    """All steps, one arm after the other."""
    engine, prompter = build_engine(config)
    assert isinstance(engine, HFEngine)
    allowed = allowed_difference(config, engine.policy.device)
    filler = LocalFiller(Rollout(engine, ParityScorer(), NoLease(), prompter.text, allowed))
    learner = build_learner(load_model(config), filler, keep_nowhere)
    filler.publish(learner.state.publisher.versions[0].message, oldest_needed=0)
    files = Interleaved([Arm(kind, folder, config, prompter) for kind in (NONE, *KINDS)], order, block)
    report = StepReport(config, files, RunTotals(), lambda: False, learner.state.plan.curriculum.metrics)
    try:
        train(learner.parts(report, NoLease()), 0, config.run.steps)
    finally:
        for arm in files.arms.values():
            arm.go_on()
    return files


def costs(blocks: Sequence[Block], kind: str) -> Iterator[float]:
    """Of each of its blocks."""
    for place, (tracked_by, seconds) in enumerate(blocks):
        if tracked_by == kind:
            yield seconds / statistics.fmean((blocks[place - 1][1], blocks[place + 1][1])) - 1


def cost_of(blocks: Sequence[Block], kind: str) -> dict[str, Any]:
    """Over its blocks."""
    found = list(costs(blocks, kind))
    return {**mean_interval(found, digits=4), "blocks": [round(cost, 4) for cost in found]}


def figures_of(kind: str, files: Interleaved, plain_s: float) -> dict[str, Any]:
    counted = files.counted(kind)
    each_s = counted.steps_s / counted.steps
    return {
        "cost": cost_of(files.blocks, kind),
        "processor_ms_a_step": milliseconds(each_s),
        "processor_share_of_the_machine": round(each_s / plain_s / (os.cpu_count() or 1), 4),
        "start_processor_s": round(counted.start_s, 2),
    }


def main() -> None:
    """Measure, write, print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=24, help="of a block")
    args = parser.parse_args()
    order = interleaved(args.rounds)
    steps = WARM + args.steps * len(order)
    config = load_config("embedded", ["pipeline.max_lag=0", "optimizer.lr=1e-9", f"run.steps={steps}"])
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as name:
        files = train_interleaved(config, Path(name), order, args.steps)
        plain_s = statistics.median(seconds for kind, seconds in files.blocks if kind == NONE)
        found = {kind: figures_of(kind, files, plain_s) for kind in KINDS}
        for arm in files.arms.values():
            arm.end()
    figures = {"load_before": load, "steps_of_a_block": args.steps, "step_ms": milliseconds(plain_s), "trackers": found}
    print(json.dumps(figures, indent=2))
    print(write_result("tracker_cost", figures))


if __name__ == "__main__":
    main()
