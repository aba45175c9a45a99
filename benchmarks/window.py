"""The page of `ui` in Chromium: how soon it is there, how quick it is, what it takes, how far it is behind a run, and
what it costs a run that is watched.

    page     50 runs, one of them with 10,000 steps and a group every tenth step. From the start of the process to all
             runs on the screen; then each page REPEATS times, from the change of the address to its last part on the
             screen; steps that are logged, until the page shows them; resident memory of the process at the end
    watched  the embedded run, in turns of TURN_S seconds: a program asks what a Monitor and a Samples page ask, nobody
             looks, Chromium shows Monitor on the same cores, nobody looks, and so on. The cost is the
             difference between the mean step of a turn and that of the next, in which nobody looks, over the latter,
             pair by pair, with Student's 95 % interval of the mean. The first steps, which warm up, are left out.
             Beside it the share of all cores that the process of the page took in these turns
    gradio   as `page`, of an application of Gradio's own components (gradio_app.py) with as many runs: from the start
             of the process to the table, from a click to the last of TOKENS coloured tokens, memory; and the same of
             our Samples page with an answer of as many tokens

    python -m benchmarks.window page                        # a minute
    python -m benchmarks.window watched --minutes 20
    python -m benchmarks.window gradio --gradio-python PYTHON       # of an environment with gradio
"""

import argparse
import http.client
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any
from urllib.parse import parse_qs, urlsplit

import psutil
from playwright.sync_api import Page, sync_playwright

from benchmarks.machine import write_result
from benchmarks.student import mean_interval
from shared.run.files import LineLog
from shared.run.metrics import MetricsLog
from shared.run.reader import Run
from tests.browser.conftest import chromium
from tests.support.planted_runs import made_up, step_of
from tests.support.window_runs import group, log_groups, long_run, sample, usual_run

RUNS = 50
REPEATS = 20
TURN_S = 15.0
EVERY_S = 1.5
"""Between two looks of a page."""
CURVES_EVERY, ANSWERS_EVERY, VERDICT_EVERY = 2, 2, 7
"""Looks."""
WARM_STEPS = 20
POINTS = 160
"""Of a curve, which Monitor asks for where it is 1280 pixels wide."""
TOKENS = 500
"""Of the answer that is compared with Gradio's."""
STEPS = "20000"
"""More than it does in that time."""
PAGES = {
    "all runs": ("#/runs", "tr[data-run=long]", ""),
    "curves of 10,000 steps": ("#/monitor/long", ".lane", ""),
    "500 of these steps": ("#/monitor/long?first=4000&last=4500", ".axis", "4000"),
    "the newest answers": ("#/samples/long", ".tokens .t", ""),
    "answers in the middle": ("#/samples/long?step=5000", ".answer", "at step 5000"),
    "two runs compared": ("#/compare?runs=run-00/run-01", ".changed summary", "alone"),
    "evaluations of a run": ("#/evaluate/run-00", ".evaluation", ""),
}
"""Address, and the element, with a text, that a page draws last."""
OPEN = """async ([hash, selector, text]) => {
    const shown = () => [...document.querySelectorAll(selector)].some(found => found.textContent.includes(text));
    const began = performance.now();
    location.hash = hash;
    while (!shown()) await new Promise(requestAnimationFrame);
    await new Promise(requestAnimationFrame);
    return performance.now() - began;
}"""

IS_SHOWN = "text => document.body.textContent.includes(text)"
SETTLED_MS = 1000.0
"""After Gradio's page is there, until its button can be clicked."""


@dataclass(frozen=True, kw_only=True)
class Served:
    """A started page."""

    process: psutil.Process
    started: float
    address: str
    port: int
    token: str

    @cached_property
    def connection(self) -> http.client.HTTPConnection:
        """Kept open, as a browser does; opened again after a close."""
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)

    def ask(self, path: str) -> Any:
        """As a tab does."""
        self.connection.request("GET", f"/api/{path}", headers={"Cookie": f"tandem-{self.port}={self.token}"})
        answer = self.connection.getresponse()
        body = answer.read()
        assert answer.status == 200, (path, body)
        return json.loads(body)


@contextmanager
def served(folder: Path) -> Iterator[Served]:
    started = time.perf_counter()
    argv = [sys.executable, "-m", "launch", "ui", str(folder), "--no-browser", "--port", "0"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        line = process.stdout.readline().strip()
        address = urlsplit(line)
        try:
            yield Served(
                process=psutil.Process(process.pid),
                started=started,
                address=line,
                port=address.port or 0,
                token=parse_qs(address.query)["token"][0],
            )
        finally:
            process.terminate()


@contextmanager
def tab() -> Iterator[Page]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        yield browser.new_page(viewport={"width": 1280, "height": 860})
        browser.close()


def measure_page() -> Mapping[str, Any]:
    with tempfile.TemporaryDirectory() as name, tab() as page:
        folder = Path(name)
        for number in range(RUNS - 2):
            usual_run(folder / f"run-{number:02d}", steps=40, right=40 + number % 20)
        long_run(folder / "long")
        going = made_up(folder / "going", steps=40)
        with going.locked(), served(folder) as found:
            page.goto(found.address)
            page.wait_for_selector("tr[data-run=long]")
            first_s = time.perf_counter() - found.started
            answers = {what: opened(page, *place) for what, place in PAGES.items()}
            behind = behind_s(page, MetricsLog(LineLog(going.metrics)), first=41)
            megabytes = found.process.memory_info().rss / 2**20
    return {"runs": RUNS, "first_page_s": first_s, "pages": answers, "behind": behind, "memory_mb": megabytes}


def measure_gradio(python: str) -> Mapping[str, Any]:
    words = " ".join(f"token{number}" for number in range(TOKENS))
    with tempfile.TemporaryDirectory() as name, tab() as page:
        folder = Path(name)
        for number in range(RUNS - 1):
            usual_run(folder / f"run-{number:02d}", steps=40)
        log_groups(made_up(folder / "answers", steps=2), [group(2, 0, [sample(words, "correct", 1.0, 0.5)])])
        with served(folder) as found:
            page.goto(found.address)
            page.wait_for_selector("tr[data-run=answers]")
            first_s = time.perf_counter() - found.started
            answer = opened(page, "#/samples/answers", ".tokens .t", f"token{TOKENS - 1}")
            ours = {"first_page_s": first_s, "answer": answer, "memory_mb": found.process.memory_info().rss / 2**20}
        return {"runs": RUNS, "tokens": TOKENS, "ui": ours, "gradio": gradio_figures(page, python)}


def gradio_figures(page: Page, python: str) -> Mapping[str, Any]:
    script = Path(__file__).with_name("gradio_app.py")
    argv = [python, "-P", str(script), "--runs", str(RUNS), "--tokens", str(TOKENS)]
    began = time.perf_counter()
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        try:
            page.goto(process.stdout.readline().strip())
            page.wait_for_function(IS_SHOWN, arg="run-00")
            first_s = time.perf_counter() - began
            taken = [clicked_ms(page) for _ in range(REPEATS)]
            memory = psutil.Process(process.pid).memory_info().rss / 2**20
        finally:
            process.terminate()
    answer = {"median_ms": median(taken), "largest_ms": max(taken), "first_ms": taken[0]}
    return {"first_page_s": first_s, "answer": answer, "memory_mb": memory}


def clicked_ms(page: Page) -> float:
    page.reload()
    page.wait_for_function(IS_SHOWN, arg="run-00")
    page.wait_for_timeout(SETTLED_MS)
    began = time.perf_counter()
    page.get_by_role("button", name="show").click()
    page.wait_for_function(IS_SHOWN, arg=f"token{TOKENS - 1}")
    return 1000 * (time.perf_counter() - began)


def opened(page: Page, hash_part: str, selector: str, text: str) -> Mapping[str, float]:
    """From a page of another kind each time."""
    taken: list[float] = []
    for _ in range(REPEATS):
        page.evaluate(OPEN, ["#/train", ".page.train", ""])
        taken.append(page.evaluate(OPEN, [hash_part, selector, text]))
    return {"median_ms": median(taken), "largest_ms": max(taken), "first_ms": taken[0]}


def behind_s(page: Page, log: MetricsLog, first: int) -> Mapping[str, float]:
    """Of steps that are logged at any moment between two looks of the page."""
    page.evaluate(OPEN, ["#/monitor/going", ".page.monitor", ""])
    taken: list[float] = []
    for step in range(first, first + REPEATS):
        time.sleep(random.uniform(0.5, 1.5))
        log.log(step_of(step, step, {}))
        began = time.perf_counter()
        page.get_by_text(f"step {step} of").first.wait_for()
        taken.append(time.perf_counter() - began)
    return {"median_s": median(taken), "largest_s": max(taken)}


def measure_watched(minutes: float) -> Mapping[str, Any]:
    with tempfile.TemporaryDirectory() as name, tab() as page:
        folder = Path(name)
        argv = ["run", "embedded", "--out", str(folder / "run"), "--steps", STEPS, "--set", "eval.problems=0"]
        # The policy stays as it is, so that all steps are alike.
        argv += ["--set", "optimizer.lr=1e-9"]
        with subprocess.Popen([sys.executable, "-m", "launch", *argv], stdout=subprocess.DEVNULL) as training:
            while not (folder / "run" / "metrics.jsonl").is_file():
                assert training.poll() is None, "the run has ended"
                time.sleep(0.1)
            with served(folder) as found:
                page.goto(found.address)
                end = time.monotonic() + 60 * minutes
                turns = list(in_turns(found, page, Run(folder / "run"), end))
            training.terminate()
    return {"minutes": minutes, **{way: cost_of(way, turns) for way in ("asked", "shown")}}


@dataclass(frozen=True, kw_only=True)
class Turn:
    """Some seconds of a watched run."""

    who: str
    """Looked."""
    steps: list[float]
    """Seconds of those that began and ended in it."""
    processor: float
    """Share of all cores that the process of the page took."""


def in_turns(found: Served, page: Page, run: Run, end: float) -> Iterator[Turn]:
    tabs = Tabs(found)
    looks: Mapping[str, Callable[[], None]] = {
        "asked": tabs.look,
        "shown": lambda: None,
        "nobody": lambda: None,
    }
    while time.monotonic() < end:
        for who in ("asked", "nobody", "shown", "nobody"):
            page.goto("about:blank") if who != "shown" else page.goto(f"http://127.0.0.1:{found.port}/#/monitor/run")
            found.connection.close()
            before, began, used = len(run.metrics), time.monotonic(), processor_s(found)
            while time.monotonic() < began + TURN_S:
                looks[who]()
                time.sleep(EVERY_S)
            share = (processor_s(found) - used) / (time.monotonic() - began) / len(os.sched_getaffinity(0))
            # The first step of a turn began in the one before.
            steps = run.metrics.column("time/step_s")[max(before + 1, WARM_STEPS) :].tolist()
            yield Turn(who=who, steps=steps, processor=share)


def processor_s(found: Served) -> float:
    times = found.process.cpu_times()
    return times.user + times.system


class Tabs:
    """What a Monitor and a Samples page ask, as monitor.js and samples.js do."""

    def __init__(self, found: Served) -> None:
        self.found = found
        self.stamps: dict[str, str] = {}
        self.num_looks = 0

    def look(self) -> None:
        """At what is new."""
        self.num_looks += 1
        if self.news("overview"):
            seldom = {f"curves?points={POINTS}": CURVES_EVERY, "lanes": CURVES_EVERY, "why": VERDICT_EVERY}
            for path in (path for path, every in seldom.items() if self.num_looks % every == 0):
                self.found.ask(f"runs/run/{path}")
        answer = self.news("steps")
        if answer and answer["steps"] and self.num_looks % ANSWERS_EVERY == 0:
            for path in ("", "/0", "/0/0"):
                self.found.ask(f"runs/run/steps/{answer['steps'][-1]}{path}")

    def news(self, question: str) -> Any:
        """The answer if it is another than last time."""
        known = self.stamps.get(question, "")
        answer = self.found.ask(f"runs/run/{question}?stamp={known}")
        self.stamps[question] = answer["stamp"]
        return None if answer["stamp"] == known else answer


def cost_of(way: str, turns: Sequence[Turn]) -> Mapping[str, Any]:
    """Of a step, as a share of one at which nobody looks; and the processor's share, which is the most it can be where
    the cores have nothing else to do."""
    full = [turn for turn in turns if turn.steps]
    pairs = [(one, other) for one, other in pairwise(full) if (one.who, other.who) == (way, "nobody")]
    steps_s = [(fmean(one.steps), fmean(other.steps)) for one, other in pairs]
    return {
        "pairs_step_s": steps_s,
        "step_s": fmean(off for _, off in steps_s),
        "cost": mean_interval([on / off - 1 for on, off in steps_s], digits=4),
        "processor": fmean(one.processor for one, _ in pairs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("page", "watched", "gradio"))
    parser.add_argument("--minutes", type=float, default=20.0, metavar="N", help="of a watched run (default: 20)")
    parser.add_argument("--gradio-python", metavar="PYTHON", help="of an environment with gradio")
    args = parser.parse_args()
    measure = {
        "page": measure_page,
        "watched": lambda: measure_watched(args.minutes),
        "gradio": lambda: measure_gradio(args.gradio_python),
    }
    found = measure[args.what]()
    print(json.dumps(found, indent=2))
    print(write_result(f"window_{args.what}", dict(found)))


if __name__ == "__main__":
    main()
