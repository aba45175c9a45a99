"""`doctor`: gathers the facts, runs all checks, prints the findings. Exit 0 without an error, 1 with one, 2 for bad
arguments; warnings do not change the exit code.

    {"doctor": 1, "time": ..., "host": ..., "config": ..., "run_dir": ..., "errors": 0,
     "findings": [{"check": "disk.speed", "level": "ok", "found": ..., "remedy": ""}, ...]}

is what `--json` prints. The names of checks, `group.function`, do not change. For a person, each check gets a line, and
the remedy follows below it; in colour on a terminal. doctor installs nothing, changes nothing and leaves no files.
"""

import json
import os
import platform
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path

from msgspec import structs
from rich.console import Console
from rich.text import Text

from launch.commands.run import default_folder, without_auto_recompute
from launch.display.console import make_console
from launch.doctor import hardware_checks, run_checks
from launch.doctor.finding import LEVELS, Finding, Level, UnknownFact, warning
from launch.doctor.machine import Machine, gather
from launch.presets.load import load_config
from shared.config.load import apply_override, config_from_json, config_to_json, resolve
from shared.config.tree import Config
from shared.process.entry_point import keep_to_itself
from shared.process.processor import is_open, settled_config
from shared.run.run_dir import RunDir

Check = Callable[[Machine], Finding]

FORMAT = 1
DEFAULT_SOURCE = "embedded"
COLOURS: dict[Level, str] = {"ok": "green", "note": "cyan", "warning": "yellow", "error": "bold red"}
INDENT = " " * 11
CHECKS: dict[str, tuple[Check, ...]] = {
    "software": (run_checks.python, run_checks.libraries, run_checks.torch, run_checks.bitsandbytes),
    "processor": (
        hardware_checks.vector_units,
        hardware_checks.cores,
        hardware_checks.container_share,
        hardware_checks.variables,
    ),
    "memory": (
        hardware_checks.available,
        hardware_checks.container_limit,
        hardware_checks.swap,
        hardware_checks.windows,
    ),
    "card": (
        hardware_checks.present,
        hardware_checks.driver,
        hardware_checks.architecture,
        hardware_checks.sharing,
        hardware_checks.memory,
        hardware_checks.allocator,
        hardware_checks.kernels,
    ),
    "disk": (
        run_checks.writable,
        run_checks.space,
        run_checks.speed,
        run_checks.file_system,
        run_checks.modes,
        run_checks.locks,
    ),
    "limits": (
        hardware_checks.open_files,
        hardware_checks.file_size,
        hardware_checks.address_space,
        hardware_checks.processes,
    ),
    "link": (run_checks.address,),
    "run": (run_checks.directory, run_checks.keys, run_checks.lock, run_checks.lease),
    "model": (
        run_checks.present,
        run_checks.access,
        run_checks.hub_cache,
        run_checks.base_cache,
        run_checks.targets,
        run_checks.tasks,
    ),
    "verifier": (run_checks.function,),
}


@dataclass(frozen=True, kw_only=True)
class Report:
    """One check and its finding."""

    group: str
    """`disk`"""
    check: str
    """`disk.speed`"""
    finding: Finding
    """What the check says."""


def run_doctor(*, source: str | None, overrides: Sequence[str], out: Path | None, as_json: bool) -> int:
    """Returns the exit code."""
    keep_to_itself()
    chosen = choose_source(source, out)
    config = read_config(chosen, overrides)
    run_dir = out or default_folder(str(chosen), datetime.now())
    reports = examine(gather(config, run_dir))
    if as_json:
        print(json.dumps(as_tree(str(chosen), run_dir, reports), indent=2))
    else:
        show(make_console(), str(chosen), run_dir, reports)
    return 1 if num_errors(reports) else 0


def choose_source(source: str | None, out: Path | None) -> str | Path:
    """What the user typed, else the config.json of the run in `out`, else the preset of a first run."""
    own = RunDir(out).config if out is not None and os.path.isfile(RunDir(out).config) else None
    return source or own or DEFAULT_SOURCE


def read_config(chosen: str | Path, overrides: Sequence[str]) -> Config:
    """Reads a preset or TOML file as `run` does, and the config.json of a run as `resume` does: only one that has not
    started gets a plan."""
    if isinstance(chosen, str):
        return load_config(chosen, overrides)
    kept = config_from_json(chosen.read_bytes())
    kept = kept if is_open(kept) else structs.replace(kept, batch=without_auto_recompute(kept.batch))
    tree = json.loads(config_to_json(kept))
    for override in overrides:
        apply_override(tree, override)
    return settled_config(resolve(tree))


def num_errors(reports: Sequence[Report]) -> int:
    return sum(report.finding.level == "error" for report in reports)


def examine(machine: Machine) -> list[Report]:
    return [
        Report(group=group, check=f"{group}.{check.__name__}", finding=finding_of(check, machine))
        for group, checks in CHECKS.items()
        for check in checks
    ]


def finding_of(check: Check, machine: Machine) -> Finding:
    """A check that lacks a fact gives a warning."""
    try:
        return check(machine)
    except UnknownFact as error:
        return warning(
            f"could not be checked: {error}", "try again; if this does not help, a run may have the same problem"
        )


def as_tree(source: str, run_dir: Path, reports: Sequence[Report]) -> dict[str, object]:
    return {
        "doctor": FORMAT,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": platform.node(),
        "config": source,
        "run_dir": str(run_dir),
        "errors": num_errors(reports),
        "findings": [
            {
                "check": report.check,
                "level": report.finding.level,
                "found": report.finding.found,
                "remedy": report.finding.remedy,
            }
            for report in reports
        ],
    }


def show(console: Console, source: str, run_dir: Path, reports: Sequence[Report]) -> None:
    print_line(console, Text(f"{source}, to run in {run_dir}"))
    for group, members in groupby(reports, key=lambda report: report.group):
        print_line(console, Text(group, "bold"))
        for report in members:
            print_line(console, finding_line(report))
            if report.finding.remedy:
                print_line(
                    console,
                    Text(f"{INDENT}-> {report.finding.remedy}", "dim" if report.finding.level == "note" else ""),
                )
    print_line(console, Text(summary(reports)))


def finding_line(report: Report) -> Text:
    """`  warning  speed: a 4 KiB write ...`"""
    level, name = report.finding.level, report.check.removeprefix(f"{report.group}.")
    return Text.assemble("  ", (f"{level:<9}", COLOURS[level]), f"{name.replace('_', ' ')}: {report.finding.found}")


def print_line(console: Console, text: Text) -> None:
    # Not wrapped, because a path that is broken over two lines cannot be copied.
    console.print(text, soft_wrap=True)


def summary(reports: Sequence[Report]) -> str:
    """`37 checks: 1 error, 2 warnings, 3 notes`"""
    counts = Counter(report.finding.level for report in reports)
    parts = [plural(counts[level], level) for level in reversed(LEVELS[1:]) if counts[level]]
    return f"{len(reports)} checks: {', '.join(parts) or 'no problems'}"


def plural(count: int, word: str) -> str:
    return f"{count} {word}{'' if count == 1 else 's'}"
