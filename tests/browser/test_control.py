"""Plan, start, stop, evaluate, chat and resume from the page, on real processes; and a page that only looks."""

import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import psutil
import pytest

from launch.ui.control import learner_of
from launch.ui.jobs import signal_sentence
from shared.run.reader import Run
from tests.browser.conftest import Visit, visit_to
from tests.support.runs import ROOT, wait_until
from tests.support.window import Window

STEPS = 4000
KEYS = {
    **{"run.steps": str(STEPS), "rollout.prompts": "4", "rollout.group": "4", "rollout.max_new_tokens": "24"},
    **{"eval.problems": "0", "compute.learner_threads": "1", "compute.actor_threads": "1"},
}
TABLES = {
    "lora.ranks": '{"q_proj" = 4}',
    "verifier.rewards": '{"think_tags" = 0.5, "answer_tags" = 0.25}',
}
QUESTION = "What is 3 + 4?"
BOTH_ANSWERED = """() => {
    const replies = [...document.querySelectorAll('.talk .two pre')];
    return replies.length === 2 && replies.every(reply => reply.textContent);
}"""


class Served:
    """`python -m launch ui --control` as a person starts it."""

    def __init__(self, folder: Path) -> None:
        argv = [sys.executable, "-m", "launch", "ui", str(folder), "--control", "--no-browser", "--port", "0"]
        self.process = subprocess.Popen(
            argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        assert self.process.stdout
        address = urlsplit(self.process.stdout.readline().strip())
        self.window = Window(port=address.port or 0, token=parse_qs(address.query)["token"][0])

    def ended(self, number: signal.Signals) -> str:
        """By this signal; what it says then."""
        self.process.send_signal(number)
        return self.process.communicate(timeout=30)[0]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Path]:
    """The folder of a run that is not there yet, and that no longer trains afterwards."""
    found = tmp_path / "mine"
    yield found
    if (found / "lock").exists() and Run(found).state() == "running":
        stop(found)


def stop(path: Path) -> None:
    psutil.Process(learner_of(path)).send_signal(signal.SIGTERM)
    wait_until(lambda: Run(path).state() == "stopped")


def steps_of(path: Path) -> int:
    return len(Run(path).metrics)


def goes_on(path: Path) -> bool:
    before = steps_of(path)
    wait_until(lambda: steps_of(path) > before)
    return Run(path).state() == "running"


@pytest.mark.timeout(400)
def test_a_run_is_steered_by_two_pages(browser: Any, run: Path) -> None:
    with_page(browser, run.parent, signal.SIGKILL, lambda visit: start(visit, run))
    assert goes_on(run), "a page that is killed ends no run"
    said = with_page(browser, run.parent, signal.SIGINT, lambda visit: steer(visit, run))
    assert said.strip().endswith("the page has ended; no run was stopped; mine goes on")
    assert goes_on(run)


def with_page(browser: Any, folder: Path, number: signal.Signals, act: Callable[[Visit], None]) -> str:
    """What the page's process says when this signal ends it."""
    served = Served(folder)
    try:
        visit = visit_to(browser, served.window)
        visit.page.set_default_timeout(120_000)
        act(visit)
        visit.page.context.close()
        visit.check()
    finally:
        said = served.ended(number)
    return said


def start(visit: Visit, run: Path) -> None:
    page = visit.page
    visit.open("#/train")
    page.get_by_label("Name", exact=True).fill(run.name)
    for key, value in KEYS.items():
        page.get_by_label("Change a key").fill(key)
        page.get_by_role("button", name=key, exact=True).click()
        page.get_by_label(key, exact=True).fill(value)
    visit.says(".command", f"run embedded --out {run} --set=run.steps={STEPS} --set=rollout.prompts=4")
    page.get_by_label("rollout.group", exact=True).fill("0")
    visit.says(".draft", "rollout.group = 0 is not allowed")
    page.get_by_label("rollout.group", exact=True).fill("4")
    page.locator(".draft").wait_for(state="hidden")

    page.get_by_role("button", name="Plan", exact=True).click()
    visit.says(".job .pill", "done")
    visit.says(".said", f"{STEPS} steps x 4 prompts x 4 samples")
    assert not run.exists(), "a plan writes nothing"

    page.get_by_role("button", name="Start", exact=True).click()
    visit.until("location.hash === '#/monitor/mine'")
    visit.says(".bar .pill", "running")


def steer(visit: Visit, run: Path) -> None:
    page = visit.page
    visit.open("#/train")
    page.get_by_role("button", name="Stop mine").click()
    visit.says('tr[data-run="mine"] .pill', "stopped")
    done = steps_of(run)
    assert 1 <= done < STEPS

    visit.go("#/evaluate/mine")
    page.get_by_label("Problems", exact=True).fill("4")
    page.get_by_label("Samples each", exact=True).fill("2")
    page.get_by_role("button", name="Evaluate", exact=True).click()
    visit.says(".job code", f"eval {run} --checkpoint latest --problems 4 --samples 2")
    visit.says(".job .pill", "done")
    visit.says(".said", "evaluated 4 of 4 tasks")
    visit.says(".evaluation h2", f"after {done} steps, 4 tasks")
    visit.says(".evaluation summary", "pass@")

    chat(visit, done)

    visit.go("#/train")
    page.get_by_role("button", name="Resume mine").click()
    visit.says('tr[data-run="mine"] .pill', "running")
    wait_until(lambda: steps_of(run) > done)

    visit.go("#/monitor/mine")
    page.get_by_role("button", name="Stop mine").click()
    visit.says(".monitor .bar .pill", "stopped")
    assert page.get_by_role("button", name="Stop mine").count() == 0
    visit.go("#/train")
    page.get_by_role("button", name="Resume mine").click()
    visit.says('tr[data-run="mine"] .pill', "running")


def processes(module: str) -> list[int]:
    """Of this user, with it in their command line."""
    found = psutil.process_iter(["pid", "cmdline"])
    return [one.info["pid"] for one in found if module in (one.info["cmdline"] or ())]


def chat(visit: Visit, done: int) -> None:
    page = visit.page
    visit.go("#/chat/mine")
    page.get_by_role("button", name="Load the models").click()
    page.locator("fieldset.ask:not([disabled])").wait_for()
    page.get_by_label("Your question").fill(QUESTION)
    page.keyboard.press("Enter")
    visit.until(BOTH_ANSWERED)
    page.locator("fieldset.ask:not([disabled])").wait_for()
    assert page.locator(".talk h2").all_inner_texts() == ["base", f"step {done}"]
    replies = page.locator(".talk pre").all_inner_texts()
    page.reload()
    page.locator("fieldset.ask:not([disabled])").wait_for()
    assert page.locator(".talk .question").all_inner_texts() == [QUESTION]
    assert page.locator(".talk pre").all_inner_texts() == replies
    page.get_by_role("button", name="End it").click()
    visit.says(".bar [role=status]", "ended")
    wait_until(lambda: not processes("launch.ui.chat_process"))


def test_a_question_that_is_refused_stays_in_its_box_and_a_crash_is_told(browser: Any, steered: Window) -> None:
    """The answers of a chat's process are made up, and none is there to take a question."""
    visit = visit_to(browser, steered)
    page = visit.page
    told = {"job": 7, "kind": "chat", "run": "first", "running": True, "code": None, "next": 0}
    told["text"] = '{"names": ["base", "step 4"]}\n'

    def answer(route: Any) -> None:
        # Taken before it is sent: the test goes on meanwhile, and may have the next text ready.
        now = dict(told)
        told["text"] = ""
        route.fulfill(json=now)

    page.route(re.compile(r"/api/jobs\?"), lambda route: route.fulfill(json={"jobs": [told]}))
    page.route(re.compile(r"/api/jobs/7\?"), answer)
    visit.open("#/chat/first")
    page.locator("fieldset.ask:not([disabled])").wait_for()
    page.get_by_label("Your question").fill(QUESTION)
    page.keyboard.press("Enter")
    visit.says(".talk .problem", "There is no process 7")
    page.locator("fieldset.ask:not([disabled])").wait_for()
    assert page.get_by_label("Your question").input_value() == QUESTION
    visit.says(".bar [role=status]", "base and step 4")

    told |= {"text": f'{{"question": "{QUESTION}"}}\nTraceback\nValueError: it broke\n', "running": False, "code": 1}
    visit.says(".talk .problem", "ValueError: it broke")
    visit.says(".bar [role=status]", "ended")
    visit.errors.clear()  # Chromium reports each answer that says what is wrong.

    told |= {"text": '{"names": ["base", "step 4"]}\n', "running": True, "code": None}
    page.reload()
    page.locator("fieldset.ask:not([disabled])").wait_for()
    told |= {"running": False, "code": -signal.SIGKILL, "cause": signal_sentence(-signal.SIGKILL, "chat")}
    visit.says(".talk .problem", "was ended by SIGKILL, probably because memory ran out")
    page.context.close()
    visit.check()


def test_an_evaluation_that_a_signal_ended_says_by_which(browser: Any, steered: Window) -> None:
    """Its answers are made up."""
    visit = visit_to(browser, steered)
    told = {"job": 7, "kind": "eval", "run": "first", "running": True, "code": None, "next": 0, "cause": ""}
    told |= {"command": "eval first", "seconds": 1.0, "text": ""}
    visit.page.route(re.compile(r"/api/jobs\?"), lambda route: route.fulfill(json={"jobs": [told]}))
    visit.page.route(re.compile(r"/api/jobs/7\?"), lambda route: route.fulfill(json=told))
    visit.open("#/evaluate/first")
    visit.says(".job code", "eval first")
    told |= {"running": False, "code": -signal.SIGSEGV, "cause": signal_sentence(-signal.SIGSEGV, "eval")}
    visit.says(".job .problem", "was ended by SIGSEGV; start it again.")
    visit.says(".job .pill", "ended")
    visit.page.context.close()
    visit.check()


def test_a_page_that_only_looks_says_how_to_do_more(visit: Visit) -> None:
    for place in ("#/train", "#/chat/first", "#/evaluate/first"):
        visit.open(place)
        visit.says("code", "python -m launch ui --control")
        assert visit.count("main button") == visit.count("main form") == 0
    visit.says(".evaluation h2", "final")


def test_a_run_is_planned_with_the_keyboard_alone(browser: Any, steered: Window) -> None:
    visit = visit_to(browser, steered)
    visit.open("#/train")
    visit.page.get_by_label("Change a key").focus()
    visit.page.keyboard.type("run.seed")
    visit.says(".offered", "Seed of all randomness")
    visit.page.keyboard.press("Tab")
    visit.page.keyboard.press("Enter")
    visit.page.keyboard.press("Control+A")
    visit.page.keyboard.type("7")
    visit.says(".command", "--set=run.seed=7")
    visit.page.keyboard.press("Tab")
    visit.page.keyboard.press("Enter")
    visit.page.locator(".command", has_text="run.seed").wait_for(state="detached")
    visit.page.context.close()
    visit.check()


def test_another_configuration_shows_its_own_values_as_they_would_be_typed(
    browser: Any, steered: Window, runs: Path
) -> None:
    (runs / "tables.toml").write_text(
        "[run]\nsteps = 7\n\n[lora.ranks]\nq_proj = 4\n\n[verifier.rewards]\nthink_tags = 0.5\nanswer_tags = 0.25\n"
    )
    visit = visit_to(browser, steered)
    page = visit.page
    visit.open("#/train")
    page.get_by_label("Change a key").fill("run.steps")
    page.get_by_role("button", name="run.steps", exact=True).click()
    visit.says(".field", "here 40")
    page.get_by_label("Configuration").select_option("tables.toml")
    visit.says(".field", "here 7")
    for key, text in TABLES.items():
        page.get_by_label("Change a key").fill(key)
        page.get_by_role("button", name=key, exact=True).click()
        assert page.get_by_label(key, exact=True).input_value() == text
        visit.says(".command", f"--set={key}={text}")
        assert page.locator(".draft").is_hidden(), page.locator(".draft").inner_text()
    page.context.close()
    visit.check()
