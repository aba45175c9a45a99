"""Sections that start whole runs: `python -m launch run`, with both processes, as a person does.

    tests           tests/gpu
    embedded_run    the embedded model: train, replay the journal, train again with an actor that is killed
    step_...        some steps at a true shape: time of each phase, memory, mismatch, and what was predicted
    residencies     the same with short completions: the base on the card all the time, in host memory meanwhile, or one
                    for both processes

Figures of a step come from metrics.jsonl, the first step left out, because it warms up. The card as a whole is watched
from outside meanwhile (measured.py).
"""

import json
import signal
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from benchmarks.gpu.measured import CardWatch, Note, Place
from benchmarks.gpu.sections import SMALL_CARD_GIB
from benchmarks.gpu.shapes import QWEN_3B, R1, Size, keys_of, write_config
from launch.card.command import traced_plan
from launch.card.published import facts_of
from launch.card.work import card_work
from launch.presets.load import load_config
from shared.config.model import ModelConfig, cache_root
from tests.support.machines import assume_speed
from tests.support.runs import (
    ROOT,
    SMALL,
    kill,
    launch,
    num_rows,
    processes_of,
    rows,
    sets,
    start,
    summary,
    wait_until,
)

TESTS_S, REPORT_S = 180, 15
"""Longest time of the tests that run together, and of those that have the card for themselves; then to report."""
PYTEST = ["-m", "pytest", "tests/gpu", "-W", "default", "-p", "no:cacheprovider", "-q", "--tb=short"]
TOGETHER = ["-n", "4", "--dist", "loadfile", "-m", "not alone"]
CARD_KEYS = ("time/", "mem/", "energy/", "mismatch/", "length/", "tokens_per_s", "grad_norm")


def tests(place: Place, note: Note) -> None:
    """Warnings do not count as errors here: the versions on a card's machine are not the ones that are tested with.
    Tests that look at the memory of the whole card have it for themselves."""
    cases, codes = list[dict[str, Any]](), list[int]()
    for name, words in {"together": TOGETHER, "alone": ["-m", "alone"]}.items():
        report = place.work / f"{name}.xml"
        report.unlink(missing_ok=True)
        code, said = tests_of(place, name, [*words, f"--junitxml={report}"])
        codes.append(code)
        note(**{name: {"exit_code": code, "said": said}})
        cases += [case_of(case) for case in ElementTree.parse(report).iter("testcase")] if report.is_file() else []
        note(
            counts=Counter(case["outcome"] for case in cases),
            cases=[case for case in cases if case["outcome"] != "skipped"],
            reasons=Counter(case["message"] for case in cases if case["outcome"] == "skipped"),
        )
    if any(codes):
        raise SystemExit("tests failed, or did not end in time")


def tests_of(place: Place, name: str, words: Sequence[str]) -> tuple[int, str]:
    """Exit code, and the end of what they said. At the limit they are interrupted, and finished ones are reported."""
    command = [sys.executable, *PYTEST, *words, *(["--collect-only"] if place.small else [])]
    with (place.work / f"{name}.log").open("w+") as log:
        running = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
        for last, seconds in {signal.SIGINT: TESTS_S, signal.SIGKILL: REPORT_S}.items():
            try:
                running.wait(seconds)
                break
            except subprocess.TimeoutExpired:
                running.send_signal(last)
        log.seek(0)
        return running.wait(), last_words(log.read())


def case_of(case: ElementTree.Element) -> dict[str, Any]:
    """Name, outcome and time of a test; of a failure, its last lines."""
    found = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
    outcome, message = ("passed", "") if found is None else (found.tag, (found.get("message") or "")[-1500:])
    name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
    return {"test": name, "outcome": outcome, "s": float(case.get("time", "0")), "message": message}


def embedded_run(place: Place, note: Note) -> None:
    """Everything that must hold of a run, on this device."""
    keys = SMALL | {"run.steps": place.size(12, 2), "compute.device": place.device.type}
    straight, disturbed = place.work / "straight", place.work / "disturbed"
    if place.small:
        assume_speed(cache_root(ModelConfig()))
    done = launch("run", "embedded", "--out", straight, *sets(keys))
    note(exit_code=done.returncode, said=last_words(done.stdout + done.stderr))
    if done.returncode:
        raise SystemExit("the run did not end")
    note(steps=of_steps(rows(straight)), replay=launch("replay", straight).returncode == 0)
    with start("run", "embedded", "--out", disturbed, *sets(keys)) as running:
        wait_until(lambda: num_rows(disturbed) > 0 and bool(processes_of(disturbed, "actor")), "a step")
        kill(processes_of(disturbed, "actor")[:1])
        said, _ = running.communicate()
    note(killed_actor={"exit_code": running.returncode, "said": last_words(said)})
    note(same_adapter_after_kill=summary(disturbed)["adapter_sha256"] == summary(straight)["adapter_sha256"])


def step_graph(place: Place, note: Note) -> None:
    step(place, note, R1)


def step_eager(place: Place, note: Note) -> None:
    step(place, note, R1, actor__graphs="never")


def step_3b(place: Place, note: Note) -> None:
    """To be compared with 24.2 s a step, published for Unsloth on a T4 with 8 completions of 200 tokens."""
    step(place, note, QWEN_3B, steps=4)


def residencies(place: Place, note: Note) -> None:
    """Short completions, so that handing over the card is a larger part."""
    for residency in ("release", "swap", "shared"):
        step(place, note, replace(R1, tokens=64), steps=4, compute__residency=residency)


def step(place: Place, note: Note, full: Size, steps: int = 3, **others: Any) -> None:
    """A run at this size. others: keys that differ, `section__key=value`. A dry run starts one and prepares the rest:
    they differ in their keys alone."""
    size = full.at(place)
    name = "-".join([note.file.stem, *map(str, others.values())])
    keys = keys_of(place, size, place.size(steps, 1), **others)
    file, out = write_config(keys, place.work / f"{name}.toml"), place.work / name
    if place.small:
        assume_speed(Path(keys["model.cache_dir"]))
    found: dict[str, Any] = {"size": vars(size), "keys": others}
    rehearsed = place.small and (full != R1 or bool(others))
    with CardWatch() as card:
        done = launch("run", file, "--out", out, "--prepare" if rehearsed else "--trace", wait_s=600.0)
    found |= {"exit_code": done.returncode, "said": last_words(done.stdout + done.stderr), "card": card.figures()}
    if (out / "metrics.jsonl").is_file():
        found["steps"] = of_steps(rows(out))
    if (out / "trace.json").is_file():
        found["phases"] = phases(json.loads((out / "trace.json").read_bytes())["traceEvents"])
    note(**{name: found})
    if not rehearsed:
        note(**{name: found | {"predicted": predicted(file, SMALL_CARD_GIB)}})
    if done.returncode:
        raise SystemExit(f"{name} ended with {done.returncode}")


def phases(events: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """`learner: turn` -> how often, and the median and sum of its seconds. Phases inside others count in both."""
    names = {event["pid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    begun, lasted = defaultdict[int, list[float]](list), defaultdict[str, list[float]](list)
    for event in events:
        if event["ph"] == "B":
            begun[event["pid"]].append(event["ts"])
        elif event["ph"] == "E":
            lasted[f"{names[event['pid']]}: {event['name']}"].append((event["ts"] - begun[event["pid"]].pop()) / 1e6)
    return {
        name: {"number": len(times), "median_s": round(median(times), 4), "sum_s": round(sum(times), 3)}
        for name, times in lasted.items()
    }


def predicted(file: Path, gib: float) -> dict[str, Any]:
    """What `plan` says of it. Made in this process, which has loaded torch; nothing of it touches the card."""
    config = load_config(str(file), here=False)
    return msgspec.to_builtins(traced_plan(facts_of(config.model), card_work(config), int(gib * 2**30)))


def of_steps(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Median of each figure over the steps but the first, which warms up; and the time of each step."""
    counted = found[1:] or found
    names = [name for name in (counted[0] if counted else {}) if name.startswith(CARD_KEYS)]
    values = {name: [row[name] for row in counted if isinstance(row[name], int | float)] for name in names}
    medians = {name: round(median(of_one), 4) for name, of_one in values.items() if of_one}
    return {"number": len(counted), "step_s": [row["time/step_s"] for row in found], **medians}


def last_words(text: str) -> str:
    return text.strip()[-1500:]
