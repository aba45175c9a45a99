"""Ten thousand steps, and a log of two gigabytes."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from shared.run.rollouts import pack_group
from tests.browser.conftest import Visit, visit_to
from tests.support.planted_runs import made_up
from tests.support.window import window
from tests.support.window_runs import group, sample

GIGABYTE = 10**9
STEPS = 350
WORDS = "six times nine " * 4_000
LONGEST_PATH = "Math.max(...[...document.querySelectorAll('path')].map(p => (p.getAttribute('d') || '').length))"


def test_ten_thousand_steps_are_drawn_and_walked(visit: Visit) -> None:
    visit.open("#/monitor/long")
    chart = visit.says(".chart", "Gradient norm")
    assert chart.locator(".top-label").inner_text() == "50", "the peak of one step is not lost"
    assert visit.page.evaluate(LONGEST_PATH) < 60_000
    visit.go("#/samples/long")
    visit.says(".answer", "at step 10000")
    visit.page.keyboard.press("k")
    visit.says(".answer", "at step 9990")
    visit.page.get_by_label("Step", exact=True).fill("5000")
    visit.page.get_by_label("Step", exact=True).press("Enter")
    visit.says(".answer", "at step 5000")


@pytest.fixture
def large(tmp_path: Path) -> Iterator[Path]:
    """A run whose log has two gigabytes; the same groups in each step."""
    run = made_up(tmp_path / "large", steps=STEPS, status="done")
    line = pack_group(group(1, 0, [sample(WORDS, "correct", 1.0, 0.5), *[sample(WORDS, "wrong", 0.0, -0.5)] * 7]))
    copies = -(-2 * GIGABYTE // (STEPS * len(line)))
    with run.rollouts.open("wb") as file:
        for step in range(1, STEPS + 1):
            file.write(copies * renumbered(line, step))
    assert run.rollouts.stat().st_size >= 2 * GIGABYTE
    yield tmp_path
    run.rollouts.unlink()


def renumbered(line: bytes, step: int) -> bytes:
    found = line.replace(b'"step":1,', b'"step":%d,' % step, 1)
    return re.sub(rb'"bytes": *\d+', b'"bytes":%10d' % len(found), found, count=1)


def test_a_log_of_two_gigabytes_is_not_loaded(browser: Any, large: Path) -> None:
    before = memory_mb()
    with window(large) as opened:
        visit = visit_to(browser, opened)
        visit.open("#/samples/large?step=200&group=0&sample=0")
        visit.says(".answer.chosen", "six times nine")
        visit.says(".tokens", "12002 tokens")
        visit.page.keyboard.press("j")
        visit.until("location.hash.includes('step=201')")
        visit.says(".answer", "six times nine")
        assert memory_mb() - before < 400
        visit.page.context.close()
        visit.check()


def memory_mb() -> float:
    """Of this process, which serves the page."""
    return psutil.Process().memory_info().rss / 2**20
