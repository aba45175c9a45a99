"""Script in a model's answer is text; a page of another site gets nothing; a stranger is not let in."""

import http.server
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.browser.conftest import Visit
from tests.support.local_server import LocalServer
from tests.support.window_runs import SCRIPT


def test_script_in_an_answer_is_shown_and_not_run(visit: Visit) -> None:
    visit.open("#/samples/first?step=5&group=0&sample=1")
    shown = visit.says(".answer.chosen pre", "<script>")
    assert SCRIPT in shown.inner_text()
    assert SCRIPT.split(" ")[0] in visit.page.locator(".tokens .text").inner_text()
    assert visit.page.evaluate("window.hacked") is None
    assert visit.count("main script") == visit.count("main img") == visit.count("main b") == 0


def test_markup_in_an_address_is_text(visit: Visit) -> None:
    visit.open("#/samples/first?step=5")
    visit.page.get_by_label("Search prompts").fill(SCRIPT)
    visit.page.keyboard.press("Enter")
    visit.says(".found h2", "<script>")
    visit.go("#/monitor/%3Cimg src=x onerror=window.hacked=3%3E")
    visit.says(".problem", "<img")
    assert visit.page.evaluate("window.hacked") is None
    visit.errors.clear()


def test_a_script_that_is_put_into_the_page_does_not_run(visit: Visit) -> None:
    visit.open()
    visit.page.evaluate("""() => {
        const script = document.createElement('script');
        script.textContent = 'window.hacked = 4';
        document.body.append(script);
    }""")
    assert visit.page.evaluate("window.hacked") is None
    assert any("Content Security Policy" in error for error in visit.errors)
    visit.errors.clear()


def test_a_stranger_sees_a_sentence(browser: Any, visit: Visit) -> None:
    page = browser.new_context().new_page()
    answer = page.goto(f"http://127.0.0.1:{visit.window.port}/?token=wrong")
    assert answer.status == 403 and "open the address" in page.content()
    page.context.close()


@pytest.fixture
def other_site() -> Iterator[str]:
    """A page on another port of this machine, which browsers take for the same site but another origin."""

    class Blank(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.end_headers()
            self.wfile.write(b"<!doctype html><title>other</title>")

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = LocalServer(("127.0.0.1", 0), Blank)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost"])
def test_the_address_works_where_it_is_clicked_on_another_page(visit: Visit, other_site: str, name: str) -> None:
    visit.page.goto(other_site.replace("127.0.0.1", name))
    visit.foreign.clear()
    link = "url => { document.body.innerHTML = '<a>go</a>'; document.body.firstChild.href = url }"
    visit.page.evaluate(link, visit.window.address)
    visit.page.get_by_text("go").click()
    visit.page.wait_for_selector("main .page")
    visit.counts("tbody tr", 4)
    assert visit.page.url == f"http://127.0.0.1:{visit.window.port}/"
    visit.page.reload()
    visit.counts("tbody tr", 4)


def test_another_page_of_the_same_browser_gets_nothing(visit: Visit, other_site: str) -> None:
    visit.open()
    stranger = visit.page.context.new_page()
    stranger.goto(other_site)
    asks = f"http://127.0.0.1:{visit.window.port}/api/runs"
    read = "url => fetch(url, {credentials: 'include'}).then(a => a.text(), e => 'refused')"
    assert stranger.evaluate(read, asks) == "refused"
    blind = "url => fetch(url, {mode: 'no-cors', credentials: 'include'}).then(a => a.type + a.status, e => 'refused')"
    assert stranger.evaluate(blind, asks) in ("refused", "opaque0")
    framed = """url => new Promise(done => {
        const frame = document.createElement('iframe');
        frame.onload = () => { try { done(frame.contentDocument ? 'open' : 'closed') } catch { done('closed') } };
        frame.src = url;
        document.body.append(frame);
    })"""
    assert stranger.evaluate(framed, f"http://127.0.0.1:{visit.window.port}/") == "closed"
