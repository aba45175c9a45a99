"""Phones, dark rooms, keyboards and screen readers."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser.conftest import Visit, visit_to
from tests.support.window import Window

PAGES = (
    "#/runs",
    "#/monitor/first",
    "#/samples/first?step=5&group=0&sample=1",
    "#/samples/first?step=5&group=2&sample=0&colour=mask",
    "#/compare?runs=first/second",
    "#/evaluate/first",
    "#/chat/first",
    "#/train",
)
READY = {
    **{"#/runs": "tbody tr", "#/monitor": ".lane", "#/samples": ".tokens .t", "#/compare": ".two"},
    **{"#/evaluate": ".evaluation table", "#/chat": "form button", "#/train": ".offered li"},
}
AXE = Path(os.environ.get("TANDEM_AXE") or "axe.min.js")
WIDE, HIGH = 360, 740
CONTRAST = """() => {
    const parse = text => text.match(/[\\d.]+/g).map(Number);
    const linear = c => c <= .04045 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4;
    const light = rgb => rgb.slice(0, 3).map(c => linear(c / 255))
        .reduce((sum, c, place) => sum + c * [.2126, .7152, .0722][place], 0);
    const ground = light(parse(getComputedStyle(document.documentElement).backgroundColor));
    const ink = light(parse(getComputedStyle(document.querySelector('h1')).color));
    return [ground, (Math.max(ground, ink) + .05) / (Math.min(ground, ink) + .05)];
}"""


def ready(visit: Visit, page: str) -> None:
    visit.open(page)
    if page == "#/train":
        for key in ("rollout.group", "model.quantization"):
            visit.page.get_by_label("Change a key").fill(key)
            visit.page.get_by_role("button", name=key, exact=True).click()
        visit.page.get_by_label("Change a key").fill("loss")
    visit.page.wait_for_selector(READY[page.split("?")[0].rsplit("/first")[0]])


@pytest.fixture
def phone(browser: Any, steered: Window) -> Iterator[Visit]:
    found = visit_to(browser, steered, viewport={"width": WIDE, "height": HIGH}, has_touch=True, is_mobile=True)
    yield found
    found.page.context.close()
    found.check()


@pytest.fixture(params=["light", "dark"])
def room(browser: Any, steered: Window, request: pytest.FixtureRequest) -> Iterator[Visit]:
    found = visit_to(browser, steered, color_scheme=request.param, reduced_motion="reduce")
    found.scheme = request.param
    yield found
    found.page.context.close()
    found.check()


@pytest.mark.parametrize("page", PAGES)
def test_a_page_fits_a_phone(phone: Visit, page: str) -> None:
    ready(phone, page)
    assert phone.page.evaluate("document.documentElement.scrollWidth") <= WIDE
    assert phone.page.locator("main h1").first.is_visible()


def test_a_phone_gets_to_an_answer(phone: Visit) -> None:
    phone.open()
    phone.page.locator('tr[data-run="first"] a.name').tap()
    phone.page.get_by_role("link", name="Answers").first.tap()
    phone.page.locator(".groups .one").first.tap()
    phone.says(".answer.chosen", "Answer")


def test_dark_is_dark_and_light_is_light(room: Visit) -> None:
    ready(room, "#/runs")
    ground, contrast = room.page.evaluate(CONTRAST)
    assert (ground < 0.1) == (room.scheme == "dark")
    assert contrast > 7


@pytest.mark.skipif(not AXE.is_file(), reason="needs axe-core, which tests/run.sh browser gets from npm")
@pytest.mark.parametrize("page", PAGES)
def test_axe_finds_nothing_serious(room: Visit, page: str) -> None:
    ready(room, page)
    # As Chromium's debugger, since the policy of the page lets nobody add a script.
    room.page.evaluate(AXE.read_text(encoding="utf-8"))
    found = room.page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    serious = [one for one in found["violations"] if one["impact"] in ("serious", "critical")]
    assert [
        (one["id"], [node["target"] for node in one["nodes"][:3]], one["nodes"][0]["any"][:1]) for one in serious
    ] == []


def test_all_can_be_reached_by_keyboard(visit: Visit) -> None:
    """From the list of runs to an answer without a mouse: Tab and Enter alone."""
    visit.open()
    visit.page.wait_for_selector("tbody tr")
    tab_to(visit, "document.activeElement.matches('tr[data-run=first] a.name')")
    visit.page.keyboard.press("Enter")
    visit.says("h1", "first")
    tab_to(visit, "document.activeElement.textContent === 'Answers'")
    visit.page.keyboard.press("Enter")
    visit.page.wait_for_selector(".tokens .t")
    tab_to(visit, "document.activeElement.matches('.groups li:nth-child(2) .one')")
    visit.page.keyboard.press("Enter")
    visit.until("location.hash.includes('group=')")
    tab_to(visit, "document.activeElement.matches('.answer:nth-child(2) button')")
    visit.page.keyboard.press("Enter")
    visit.until("location.hash.includes('sample=1')")
    tab_to(visit, "document.activeElement.matches('.tokens .text')")
    visit.page.keyboard.press("ArrowRight")
    visit.says(".tokens .figures", "token 0")


def tab_to(visit: Visit, condition: str) -> None:
    for _ in range(80):
        visit.page.keyboard.press("Tab")
        if visit.page.evaluate(condition):
            return
    raise AssertionError(f"80 times Tab, and never {condition}")


def test_the_focus_is_always_visible(visit: Visit) -> None:
    ready(visit, "#/runs")
    visit.page.keyboard.press("Tab")
    for _ in range(8):
        visit.page.keyboard.press("Tab")
        style = visit.page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert style != "none"
