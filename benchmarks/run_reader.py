"""What rollouts.jsonl costs a step, and what a log of 2 GB and 10,000 steps costs its reader.

    python -m benchmarks.run_reader                  writes results/run_reader.json; 3 minutes, 2 GB of disk for a while

The cost of a step is the processor time of RolloutLog.log in a run of a preset, all groups written, over the wall time
of its steps. The large log is the same few groups again and again, with other steps; it is in the page cache when it is
read, as the log of a run is that somebody watches. A search that finds nothing reads everything it may look at.
"""

import argparse
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from actor.rollout import Rollout
from actor.wiring import build_engine
from benchmarks.local_run import ParityScorer, Rows
from benchmarks.machine import write_result
from launch.commands.in_process import LocalFiller
from launch.presets.load import load_config
from learner.durable.state import RunTotals
from learner.loop import train
from learner.objective.batch import StepBatch
from learner.objective.judged import Collected
from learner.quarantine.quarantine import keep_nowhere
from learner.reports.rollout_log import RolloutLog
from learner.reports.step_report import StepReport
from learner.session import words_of
from learner.update.figures import StepResult
from learner.wiring import build_learner, load_model
from shared.process.lease import NoLease
from shared.run.files import LineLog
from shared.run.metrics import StepMetrics
from shared.run.rollout_index import RolloutIndex
from shared.run.rollouts import DIGITS, START

BYTES = 2 * 2**30
STEPS = 10_000
SEARCHED = 100


class TimedLog:
    """Writes rollouts and nothing else."""

    def __init__(self, log: RolloutLog) -> None:
        self.log = log
        self.rows = Rows()
        self.seconds: list[float] = []

    def step(self, step: int, metrics: StepMetrics, collected: Collected, batch: StepBatch, result: StepResult) -> None:
        """Processor time, since another process may have the core."""
        begin = time.process_time()
        self.log.log(step, collected, batch, result)
        self.seconds.append(time.process_time() - begin)
        self.rows.step(step, metrics, collected, batch, result)

    def checkpoint(self, step: int, totals: RunTotals) -> None:
        """Not kept."""


def cost_of_log(file: Path, steps: int) -> dict[str, float]:
    """Of the first run's preset."""
    sets = [f"run.steps={steps}", "eval.problems=0", "log.rollouts_kb=1000000"]
    config = load_config("embedded", sets, here=True)
    engine, prompter = build_engine(config)
    filler = LocalFiller(Rollout(engine, ParityScorer(), NoLease(), prompter.text))
    model = load_model(config)
    learner = build_learner(model, filler, keep_nowhere)
    files = TimedLog(RolloutLog(LineLog(file), config.log, words_of(model)))
    filler.publish(learner.state.publisher.versions[0], oldest_needed=0)
    report = StepReport(config, files, RunTotals(), lambda: False, learner.state.plan.curriculum.metrics)
    train(learner.parts(report, NoLease()), 0, steps)
    step_ms = 1000 * median(row.step_s for row in files.rows.rows)
    log_ms = 1000 * median(files.seconds)
    return {
        "step_ms": round(step_ms, 1),
        "log_ms": round(log_ms, 3),
        "percent_of_a_step": round(100 * log_ms / step_ms, 2),
        "first_log_ms": round(1000 * files.seconds[0], 1),
        "kb_a_step": round(file.stat().st_size / steps / 1000, 1),
    }


def enlarged(source: Path, target: Path) -> None:
    """The groups of source, again and again, with steps that go up to STEPS and lines that are padded to BYTES."""
    lines = source.read_bytes().splitlines()[:4]
    padded = BYTES // (STEPS * len(lines))
    with target.open("wb") as file:
        for step in range(1, STEPS + 1):
            for line in lines:
                rest = b'"step":%d,%s' % (step, line[line.index(b'"group_id"') :])
                size = len(START) + DIGITS + 1 + len(rest) + 1
                file.write(START + b"%*d," % (DIGITS, max(size, padded)) + rest + b" " * max(0, padded - size) + b"\n")


def cost_of_reading(file: Path) -> dict[str, float]:
    index = RolloutIndex(file)
    groups, first_s = timed(lambda: len(index))
    steps, steps_s = timed(index.steps)
    heads, heads_s = timed(lambda: index.heads(STEPS // 2))
    group, group_s = timed(lambda: index.group(STEPS, 0))
    history, history_s = timed(lambda: index.history(heads[0].task))
    hits, search_s = timed(lambda: list(index.search("no such words", first=STEPS - SEARCHED + 1)))
    assert group and groups == 4 * len(steps) and len(history) >= STEPS and not hits and index.damaged == 0
    return {
        "bytes": file.stat().st_size,
        "groups": groups,
        "first_look_ms": round(1000 * first_s, 1),
        "steps_ms": round(1000 * steps_s, 1),
        "groups_of_a_step_ms": round(1000 * heads_s, 2),
        "one_group_ms": round(1000 * group_s, 2),
        "task_over_all_steps_ms": round(1000 * history_s, 1),
        f"search_of_{SEARCHED}_steps_ms": round(1000 * search_s, 1),
    }


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    begin = time.perf_counter()
    found = work()
    return found, time.perf_counter() - begin


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    steps = parser.parse_args(argv).steps
    with tempfile.TemporaryDirectory() as folder:
        small, large = Path(folder) / "small.jsonl", Path(folder) / "large.jsonl"
        writing = cost_of_log(small, steps)
        enlarged(small, large)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        reading = cost_of_reading(large)
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    figures = {"writing": writing, "reading": reading | {"peak_grown_mb": round(grown, 1)}}
    print(write_result("run_reader", figures).read_text())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
