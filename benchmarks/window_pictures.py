"""Pictures of the page of `ui` for its README, taken of real runs in Chromium.

python -m launch run embedded --out runs/first
python -m benchmarks.window_pictures runs first          # launch/ui/pictures/monitor.png, samples.png
"""

import argparse
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

from tests.browser.conftest import chromium
from tests.support.window import window

PICTURES = Path(__file__).resolve().parents[1] / "launch" / "ui" / "pictures"
WIDE, HIGH = 1100, 760
PAGES = {"monitor": ("#/monitor/{run}", ".lane"), "samples": ("#/samples/{run}?colour=entropy", ".tokens .t")}
"""Address, and what the page draws last."""
LARGEST = 200_000
"""Bytes."""


def take(page: Page, address: str, run: str) -> None:
    page.goto(address)
    for name, (place, ready) in PAGES.items():
        page.evaluate("hash => { location.hash = hash }", place.format(run=run))
        page.wait_for_selector(ready)
        file = PICTURES / f"{name}.png"
        size = len(page.screenshot(path=file))
        print(f"{file}, {size} bytes")
        assert size <= LARGEST, "make the window smaller"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("run")
    args = parser.parse_args()
    PICTURES.mkdir(exist_ok=True)
    with window(args.folder) as opened, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        take(browser.new_page(viewport={"width": WIDE, "height": HIGH}), opened.address, args.run)
        browser.close()


if __name__ == "__main__":
    main()
