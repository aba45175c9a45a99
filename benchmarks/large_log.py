"""Reading a run of 10,000 steps whose rollouts.jsonl has 2 GB: how long each page takes, and how much memory.

The run is made up and written with the project's own records and writers: 4 groups of 8 answers a step, each token with
its figures, and a row of metrics a step. Another process reads it then, as `python -m launch ui` does, without the
network between: the first time with nothing of the log in the kernel's cache, then with what the questions before left.

    open         the run, and the place of each group in the log (RolloutIndex)
    pages        the questions of the Runs, Monitor and Samples pages, and report.html
    groups       the list of a step, one group, one answer; median and slowest of many steps
    search       a text that is in one group near the end: requests, each as long as the page lets it be, until found
    resume       what the learner does with the log when a run goes on: nothing to drop, and the last ten steps to drop
    memory       the most that the reading process had, imports included

Needs 6 GB on the disk of --folder, and removes what it made there.

    python -m benchmarks.large_log [--gigabytes 2] [--steps 10000] [--folder FOLDER]
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import structs

from benchmarks.machine import write_result
from shared.run.files import LineLog
from shared.run.rollouts import RolloutGroup, RolloutSample, pack_group
from shared.run.run_dir import RunDir

NEEDED_BYTES = 6 * 10**9
GROUPS, ANSWERS = 4, 8
TEMPLATES = 32
"""Groups that are drawn; the others are these with other numbers."""
TASKS = 2048
WORDS = ("we", "have", "boxes", "of", "pens", "so", "six", "times", "nine", "is", "54", "and", "then", "add", "7")
RARE = "an unusual remark"
ASKED = 200
"""Steps that are looked at, drawn at random."""
SEED = 0


def sample(rng: np.random.Generator, tokens: int) -> RolloutSample:
    """With the digits that the learner writes."""
    words = [str(word) for word in rng.choice(WORDS, tokens)]
    right = bool(rng.random() < 0.5)
    return RolloutSample(
        text=" ".join(words),
        turns=None,
        ids=rng.integers(0, 150_000, tokens).tolist(),
        pieces=[f" {word}" for word in words],
        outcome="correct" if right else "wrong",
        reward=float(right),
        rewards={},
        finish="stop",
        advantage=0.5 if right else -0.5,
        kept=True,
        logprob=np.round(-rng.exponential(0.5, tokens), 4).tolist(),
        gap=np.round(rng.normal(0, 2e-4, tokens), 6).tolist(),
        entropy=np.round(rng.exponential(0.7, tokens), 4).tolist(),
        mask=rng.integers(0, 2, tokens).tolist(),
    )


def template(rng: np.random.Generator, tokens: int) -> RolloutGroup:
    samples = tuple(sample(rng, tokens) for _ in range(ANSWERS))
    return RolloutGroup(
        step=0,
        group_id="",
        task="",
        version=0,
        fate="trained",
        rewards=tuple(one.reward for one in samples),
        advantages=tuple(one.advantage for one in samples),
        outcomes=tuple(one.outcome for one in samples),
        lengths=(tokens,) * ANSWERS,
        prompt=f"user\n{' '.join(map(str, rng.choice(WORDS, 60)))}\nassistant\n",
        answer="54",
        samples=samples,
    )


def templates(line_bytes: float) -> list[RolloutGroup]:
    """Whose lines are about so long."""
    rng, tokens = np.random.default_rng(SEED), 100
    tokens = max(1, round(tokens * line_bytes / len(pack_group(template(rng, tokens)))))
    return [template(rng, tokens) for _ in range(TEMPLATES)]


# What loads torch is imported where it is used: the reading process must not have it.
def write(folder: Path, steps: int, gigabytes: float) -> RunDir:
    from tests.support.planted_runs import made_up

    run = made_up(folder / "large", steps=steps, status="done")
    drawn = templates(gigabytes * 1e9 / steps / GROUPS)
    log, rng = LineLog(run.rollouts), np.random.default_rng(SEED)
    for step in range(1, steps + 1):
        for slot in range(GROUPS):
            one = structs.replace(
                drawn[(step * GROUPS + slot) % TEMPLATES],
                step=step,
                group_id=f"train/{step - 1:06d}/{slot:04d}",
                task=f"{rng.integers(TASKS):016x}",
                version=step - 1,
            )
            if step == steps - 1 and slot == 0:
                one = structs.replace(one, samples=(structs.replace(one.samples[0], text=RARE), *one.samples[1:]))
            log.append_line(pack_group(one))
    log.sync()
    log.close()
    return run


def seconds(act: Callable[[], Any]) -> float:
    start = time.perf_counter()
    act()
    return round(time.perf_counter() - start, 4)


def spread(times: list[float]) -> dict[str, float]:
    return {"median_s": round(statistics.median(times), 4), "slowest_s": max(times), "n": len(times)}


def read(folder: Path) -> dict[str, Any]:
    """In a process of its own."""
    imported = seconds(lambda: __import__("launch.ui.app"))
    from launch.display.page.command import rendered
    from launch.ui import monitor, runs_folder, samples
    from launch.ui.runs_folder import RunsFolder

    runs = RunsFolder(folder)
    opened = runs.open("large")
    found: dict[str, Any] = {"import_s": imported}
    found["open_cold_s"] = seconds(lambda: len(opened.run.rollouts))
    found["open_again_s"] = seconds(lambda: len(RunsFolder(folder).open("large").run.rollouts))
    found["bytes"], found["groups"] = opened.run.rollouts.size, len(opened.run.rollouts)
    found["pages"] = {
        "runs": seconds(lambda: runs_folder.described(opened)),
        "overview": seconds(lambda: monitor.overview(opened, {})),
        "overview, nothing new": seconds(lambda: monitor.overview(opened, {"stamp": opened.stamp()})),
        "curves": seconds(lambda: monitor.curves(opened, {})),
        "curves of 100 steps": seconds(lambda: monitor.curves(opened, {"first": "5000", "last": "5100"})),
        "lanes": seconds(lambda: monitor.lanes(opened, {})),
        "why": seconds(lambda: monitor.why(opened, {})),
        "steps": seconds(lambda: samples.steps(opened, {})),
    }
    steps = np.random.default_rng(SEED).choice(opened.run.rollouts.steps(), ASKED).tolist()
    asked = [{"step": str(step), "group": "1", "sample": "3"} for step in steps]
    tasks = [opened.run.rollouts.heads(step)[0].task for step in steps]
    found["groups of a step"] = spread([seconds(lambda one=one: samples.groups(opened, one)) for one in asked])
    found["a group"] = spread([seconds(lambda one=one: samples.group(opened, one)) for one in asked])
    found["an answer"] = spread([seconds(lambda one=one: samples.answer(opened, one)) for one in asked])
    found["a task in all steps"] = spread([seconds(lambda t=t: samples.history(opened, {"task": t})) for t in tasks])
    found["search"] = searched(lambda first: samples.search(opened, {"text": RARE, "first": str(first)}))
    found["before report_mb"] = peak_mb()
    found["pages"]["report.html"] = seconds(lambda: rendered([opened.run]))
    found["peak_mb"] = peak_mb()
    return found


def searched(ask: Callable[[int], dict[str, Any]]) -> dict[str, Any]:
    """Until the text is found, as a person goes on who clicks."""
    first, times = 0, list[float]()
    while True:
        start = time.perf_counter()
        found = ask(first)
        times.append(round(time.perf_counter() - start, 4))
        if found["hits"] or not found["next"]:
            return {"requests": len(times), "whole_s": round(sum(times), 3), "slowest_s": max(times)}
        first = found["next"]


def peak_mb() -> float:
    """As the kernel counts it since this program began; getrusage counts what the parent had, too."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return round(int(line.split()[1]) / 1024, 1)


def forget(path: Path) -> None:
    """Take a file out of the kernel's cache."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def resumed(run: RunDir, steps: int) -> Iterator[tuple[str, float]]:
    from learner.reports.rollout_log import RolloutLog, Words
    from shared.config.processes import LogConfig

    lines = LineLog(run.rollouts)
    log = RolloutLog(lines, LogConfig(), Words(text=str, spelled=str))
    yield "nothing to drop", seconds(lambda: log.resume_at(steps + 1))
    yield "ten steps to drop", seconds(lambda: log.resume_at(steps - 9))
    lines.close()


def measured(folder: Path, steps: int, gigabytes: float) -> dict[str, Any]:
    start = time.perf_counter()
    run = write(folder, steps, gigabytes)
    written = round(time.perf_counter() - start, 1)
    forget(run.rollouts)
    reader = [sys.executable, "-m", "benchmarks.large_log", "--read", str(folder)]
    found = json.loads(subprocess.run(reader, capture_output=True, check=True, text=True).stdout)
    resume_s = dict(resumed(run, steps))
    return {"steps": steps, "written_s": written, **found, "resume_s": resume_s}


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Measure reading a large run.")
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--folder", type=Path, help="where the run is made; default: the system's temporary folder")
    parser.add_argument("--read", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--no-result", action="store_true", help="print the figures and write no file")
    arguments = parser.parse_args(words)
    if arguments.read:
        print(json.dumps(read(arguments.read)))
        return
    with tempfile.TemporaryDirectory(dir=arguments.folder) as temporary:
        if (free := shutil.disk_usage(temporary).free) < NEEDED_BYTES:
            raise SystemExit(f"{temporary} has {free / 1e9:.1f} GB free, 6 GB are needed; choose another --folder.")
        found = measured(Path(temporary), arguments.steps, arguments.gigabytes)
    print(json.dumps(found, indent=2))
    if not arguments.no_result:
        write_result("large_log", found)


if __name__ == "__main__":
    main()
