"""A real Chromium and pages of runs. Everything here is skipped, with one reason, where there is no Chromium.

No request may leave this machine, no script may fail, and no policy of the page may be violated: each test ends with
that check. `tests/run.sh browser` installs Chromium and axe-core, where it can.
"""

import math
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support.window import Window, window
from tests.support.window_runs import hacked_run, long_run, usual_run

sync_api = pytest.importorskip("playwright.sync_api", reason="tests/browser needs playwright: tests/run.sh browser")
Page, Browser = sync_api.Page, sync_api.Browser
WAIT_MS = 60_000
ACTORS = {
    **{"box-1/tokens_per_s": 1234.0, "box-1/waiting": 0.5, "box-1/faults": 0.0, "box-1/version": 11.0},
    **{"b/2/tokens_per_s": 90.0, "b/2/waiting": 0.25, "b/2/faults": 1.0, "b/2/version": 12.0},
    **{"gone/tokens_per_s": math.nan, "gone/waiting": math.nan, "gone/faults": math.nan, "gone/version": math.nan},
}


def chromium() -> str | None:
    """Of the system; None for the one that playwright installed, if it did."""
    return os.environ.get("TANDEM_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        path = chromium()
        if path is None and not Path(playwright.chromium.executable_path).exists():
            pytest.skip("tests/browser needs Chromium, and none is installed: tests/run.sh browser")
        # A container's root has no sandbox to give to it.
        made = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield made
        made.close()


@dataclass
class Visit:
    """A tab of the browser on a page, and what went wrong in it."""

    page: Any
    window: Window
    scheme: str = "light"
    foreign: list[str] = field(default_factory=list[str])
    errors: list[str] = field(default_factory=list[str])

    def open(self, hash_part: str = "") -> None:
        self.page.goto(self.window.address + hash_part)
        self.page.wait_for_selector("main .page")

    def go(self, hash_part: str) -> None:
        """As if it had been typed into the address bar."""
        self.page.evaluate("hash => { location.hash = hash }", hash_part)

    @property
    def hash(self) -> str:
        return self.page.evaluate("location.hash")

    def says(self, selector: str, text: str) -> Any:
        """An element with this text, once it is there."""
        found = self.page.locator(selector, has_text=text).first
        found.wait_for(state="visible", timeout=WAIT_MS)
        return found

    def until(self, condition: str) -> None:
        """Until this expression is true. Playwright's own way evaluates text in the page, which its policy forbids."""
        deadline = time.monotonic() + WAIT_MS / 1000
        while not self.page.evaluate(condition):
            assert time.monotonic() < deadline, condition
            self.page.wait_for_timeout(100)

    def held(self, pattern: str) -> "HeldAnswers":
        """From now on, answers to such questions come only when they are let through."""
        return HeldAnswers(self.page, pattern)

    def count(self, selector: str) -> int:
        return self.page.locator(selector).count()

    def counts(self, selector: str, expected: int) -> None:
        """Once so many are there: parts of a page that are asked for separately arrive one after the other."""
        self.until(f"document.querySelectorAll({selector!r}).length === {expected}")

    def check(self) -> None:
        assert self.foreign == [], "asked another host"
        assert self.errors == []


class HeldAnswers:
    """Questions of a page that wait for their answers."""

    def __init__(self, page: Any, pattern: str) -> None:
        self.page, self.pattern = page, pattern
        self.routes: list[Any] = []
        page.route(pattern, lambda route: self.routes.append(route))

    def let_through(self) -> None:
        """The only one, until the page has dealt with its answer."""
        (route,) = self.routes
        with self.page.expect_response(self.pattern):
            route.continue_()
        self.page.wait_for_timeout(500)


def visit_to(browser: Any, opened: Window, **context: Any) -> Visit:
    made = browser.new_context(**context)
    page = made.new_page()
    page.set_default_timeout(WAIT_MS)
    visit = Visit(page=page, window=opened)
    own = f"http://127.0.0.1:{opened.port}/"
    page.on("request", lambda request: request.url.startswith((own, "data:")) or visit.foreign.append(request.url))
    page.on("console", lambda message: message.type in ("error", "warning") and visit.errors.append(message.text))
    page.on("pageerror", lambda error: visit.errors.append(str(error)))
    return visit


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    usual_run(folder / "first")
    usual_run(
        folder / "second",
        right=60,
        reward_mean=(0.5, 0.7),
        rollout_s=1.0,
        actors=ACTORS,
        limited={"link.credits": 0.25},
        # Of the base, in the row that came after it was evaluated.
        evaluated=lambda step: {"step": 0.0, "greedy": 0.31, "sampled": 0.31} if step == 3 else {},
        groups_idle=3,
        groups_quarantined=lambda step: 16 if step == 12 else 0,
    )
    hacked_run(folder / "hacked")
    long_run(folder / "long")
    return folder


@pytest.fixture(scope="session")
def opened(runs: Path) -> Iterator[Window]:
    with window(runs) as found:
        yield found


@pytest.fixture(scope="session")
def steered(runs: Path) -> Iterator[Window]:
    """With --control."""
    with window(runs, control=True) as found:
        yield found


@pytest.fixture
def visit(browser: Any, opened: Window) -> Iterator[Visit]:
    found = visit_to(browser, opened)
    yield found
    found.page.context.close()
    found.check()
