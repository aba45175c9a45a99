"""The Samples page as files: from a folder without a server, and from any web server."""

import functools
import http.server
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from launch.__main__ import main
from tests.browser.conftest import WAIT_MS, Visit
from tests.support.local_server import LocalServer
from tests.support.window import Window
from tests.support.window_runs import SCRIPT

COLOURED = "[...document.querySelectorAll('.t')].some(t => t.style.getPropertyValue('--a'))"
GROUPS = "document.querySelectorAll('.groups .one').length"


@dataclass(frozen=True, kw_only=True)
class Place(Window):
    """Where index.html is."""

    folder: str

    @property
    def address(self) -> str:
        return f"{self.folder}index.html"


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(scope="session")
def written(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundle") / "first"
    assert main(["report", str(runs / "first"), "--bundle", str(folder)]) == 0
    return folder


@pytest.fixture(params=["file", "http"])
def place(written: Path, request: pytest.FixtureRequest) -> Iterator[Place]:
    if request.param == "file":
        yield Place(port=0, token="", folder=f"{written.as_uri()}/")
        return
    handler = functools.partial(Quiet, directory=str(written))
    server = LocalServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield Place(port=server.server_port, token="", folder=f"http://127.0.0.1:{server.server_port}/")
    server.shutdown()
    server.server_close()


@pytest.fixture
def files(browser: Any, place: Place) -> Iterator[Visit]:
    page = browser.new_context().new_page()
    page.set_default_timeout(WAIT_MS)
    found = Visit(page=page, window=place)
    own = (place.folder, "data:")
    page.on("request", lambda request: request.url.startswith(own) or found.foreign.append(request.url))
    page.on("console", lambda message: message.type in ("error", "warning") and found.errors.append(message.text))
    page.on("pageerror", lambda error: found.errors.append(str(error)))
    yield found
    page.context.close()
    found.check()


def test_a_deep_link_shows_an_answer_and_its_script_as_text(files: Visit) -> None:
    files.open("#/samples/first?step=5&group=0&sample=1&colour=mask")
    shown = files.says(".answer.chosen pre", "<script>")
    assert SCRIPT in shown.inner_text()
    assert SCRIPT.split(" ")[0] in files.page.locator(".tokens .text").inner_text()
    assert files.page.evaluate("window.hacked") is None
    assert files.count("main script") == files.count("main img") == files.count("main b") == 0
    assert files.page.get_by_label("Colour").input_value() == "mask"
    files.page.reload()
    files.says(".answer.chosen pre", "<script>")
    files.says("h3", "This task in 12 steps")


def test_filters_orders_colours_and_keys_work(files: Visit) -> None:
    files.open()
    files.says("h1", "first")
    files.says(".answer", "54 at step 12")
    files.go("#/samples/first?step=5")
    files.says(".answer", "54 at step 5")
    files.page.get_by_role("button", name="truncated 1").click()
    files.until(f"{GROUPS} === 1")
    assert "outcome=truncated" in files.hash
    files.page.keyboard.press("Escape")
    files.until(f"{GROUPS} === 3")
    files.page.get_by_label("Order").select_option("untrained")
    files.page.wait_for_selector(".groups li:first-child .one.idle")
    files.page.get_by_label("Colour").select_option("entropy")
    files.until("location.hash.includes('colour=entropy')")
    files.until(COLOURED)
    files.page.locator(".tokens .t").nth(2).hover()
    files.says(".tokens .figures", "token 2")
    files.page.keyboard.press("j")
    files.until("location.hash.includes('step=6')")
    files.says(".about", "train/000005/0001")


def test_a_text_is_searched_and_other_pages_are_not_offered(files: Visit) -> None:
    files.open("#/samples/first?step=5")
    files.says(".answer", "54 at step 5")
    assert files.page.locator("#tabs a").all_inner_texts() == ["Samples"]
    files.page.keyboard.press("/")
    files.page.keyboard.type("AT STEP 7")
    files.page.keyboard.press("Enter")
    files.says(".found h2", "1 places")
    files.page.locator(".found a").click()
    files.says(".answer.chosen", "54 at step 7")
    files.go("#/monitor/first")
    files.says(".answer", "54 at step 12")


@pytest.mark.parametrize(
    ("query", "sentence"),
    [
        ("first?step=999", "Step 999 has no groups in these files"),
        ("first?step=5&group=9", "Step 5 has no group 9"),
        ("first?step=../5", "expected a whole number"),
        ("second?step=5", "There is no run 'second' in these files"),
        ("%3Cimg src=x onerror=window.hacked=3%3E?step=5", "There is no run '<img"),
    ],
)
def test_what_is_not_there_is_said(files: Visit, query: str, sentence: str) -> None:
    files.open("#/samples/first?step=5")
    files.says(".answer", "54 at step 5")
    files.go(f"#/samples/{query}")
    files.says(".problem", sentence)
    assert files.page.evaluate("window.hacked") is None
