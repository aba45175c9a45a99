"""The runs of one folder, by name, and what the page of all runs shows of each.

A name comes from the address bar, so it is only ever compared: it must be the name of a run directly below the folder,
and its folder must lie there, also after links have been followed. If the folder that was given is itself a run, it is
the only one.

Nothing is kept that the files do not have: what has been read of a run is read again when its files have changed. Each
run has a lock, because its reader serves one thread at a time.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from launch.display.watch import goal
from launch.ui.questions import NotThere, is_text
from launch.why.command import KeptVerdicts
from shared.errors import UserError
from shared.run.metrics import Row
from shared.run.reader import Run, find_runs, state_of
from shared.run.run_dir import RunDir
from shared.run.summary import RunVerdict

CURVE_POINTS = 60


class OpenRun:
    """A run, and what was computed from its files."""

    def __init__(self, path: Path) -> None:
        self.name = path.name
        self.run = Run(path)
        self.lock = threading.Lock()
        self.described: tuple[str, dict[str, Any]] = ("", {})
        self.happened: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
        """The state of some files, and what monitor.py made of them."""
        self.verdicts = KeptVerdicts(self.run)

    def stamp(self) -> str:
        return self.run.stamp()

    def description(self, stamp: str) -> dict[str, Any]:
        """A row of the page of all runs. A damaged run is shown with its problem."""
        if self.described[0] != stamp:
            try:
                self.described = (stamp, described(self))
            except UserError as error:
                self.described = (stamp, broken(self.run.files, str(error)))
        return self.described[1]


def described(opened: OpenRun) -> dict[str, Any]:
    run, metrics = opened.run, opened.run.metrics
    config, summary, steps = run.config(), run.summary(), len(metrics)
    last: Row = metrics.row(-1) if steps else {}
    key = goal([last] if steps else [])
    why = summary.why if summary and summary.why else None
    return {
        "name": opened.name,
        "status": run.state(),
        "verdict": verdict_row(why) if why else None,
        "goal": key,
        "curve": metrics.thinned([key], CURVE_POINTS)[key].mean if steps else [],
        "reward": last.get(key),
        "steps": steps,
        "planned": config.run.steps,
        "model": config.model.path,
        "tasks": config.tasks.source,
        "changed": changed(run.files),
        "problem": "",
    }


def broken(files: RunDir, problem: str) -> dict[str, Any]:
    nothing: dict[str, Any] = {"verdict": None, "goal": "", "curve": [], "reward": None, "steps": 0, "planned": 0}
    known = {"name": files.path.name, "status": "damaged", "changed": changed(files), "problem": problem}
    return nothing | known | {"model": "", "tasks": ""}


def changed(files: RunDir) -> float:
    """When one of its files was last written; Unix time."""
    return max(state_of(path)[2] for path in (files.config, files.metrics, files.summary)) / 1e9


def verdict_row(verdict: RunVerdict) -> dict[str, Any]:
    return {
        "name": verdict.name,
        "fault": verdict.fault,
        "evidence": verdict.evidence,
        "remedy": verdict.remedy,
    }


class RunsFolder:
    """What `ui` was given."""

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()
        self.single = self.path.name if (self.path / "config.json").is_file() else ""
        self.parent = self.path.parent if self.single else self.path
        self.opened: dict[str, OpenRun] = {}
        self.lock = threading.Lock()

    def all(self) -> list[OpenRun]:
        """The runs that were written last come first. Names that are not UTF-8 are left out: JSON cannot carry them."""
        found = [self.parent / self.single] if self.single else filter(self.is_inside, find_runs(self.path))
        with self.lock:
            return [self.known(path.name) for path in found if is_text(path.name)]

    def has(self, name: str) -> bool:
        if self.single:
            return name == self.single
        there = {found.parent.name for found in self.parent.glob("*/config.json")}
        return name in there and self.is_inside(self.parent / name)

    def is_inside(self, path: Path) -> bool:
        return path.resolve().parent == self.parent

    def open(self, name: str) -> OpenRun:
        """Raises NotThere for whatever is not the name of a run of this folder."""
        if not self.has(name):
            raise NotThere(f"There is no run {name!r} in {self.path}; choose one of the list.")
        with self.lock:
            return self.known(name)

    def known(self, name: str) -> OpenRun:
        if name not in self.opened:
            self.opened[name] = OpenRun(self.parent / name)
        return self.opened[name]

    @contextmanager
    def reading(self, name: str) -> Iterator[OpenRun]:
        """The only thread that reads this run."""
        opened = self.open(name)
        with opened.lock:
            yield opened
