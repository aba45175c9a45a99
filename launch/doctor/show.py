"""The findings for a person: grouped, a line a check, the remedy below it. In colour on a terminal, else plain."""

from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from rich.console import Console
from rich.text import Text

from launch.doctor.examine import Report
from launch.doctor.finding import LEVELS, Level

COLOURS: dict[Level, str] = {"ok": "green", "note": "cyan", "warning": "yellow", "error": "bold red"}
INDENT = " " * 11


def show(console: Console, source: str, run_dir: Path, reports: Sequence[Report]) -> None:
    """What was looked at, all findings, and the sum."""
    line(console, Text(f"{source}, to run in {run_dir}"))
    for group, members in groupby(reports, key=lambda report: report.group):
        line(console, Text(group, "bold"))
        for report in members:
            line(console, finding_line(report))
            if report.finding.remedy:
                line(
                    console,
                    Text(f"{INDENT}-> {report.finding.remedy}", "dim" if report.finding.level == "note" else ""),
                )
    line(console, Text(summary(reports)))


def finding_line(report: Report) -> Text:
    """`  warning  speed: a 4 KiB write ...`"""
    level, name = report.finding.level, report.check.removeprefix(f"{report.group}.")
    return Text.assemble("  ", (f"{level:<9}", COLOURS[level]), f"{name.replace('_', ' ')}: {report.finding.found}")


def line(console: Console, text: Text) -> None:
    """As long as it is: a path that is broken over two lines cannot be copied."""
    console.print(text, soft_wrap=True)


def summary(reports: Sequence[Report]) -> str:
    """`37 checks: 1 error, 2 warnings, 3 notes`"""
    counts = Counter(report.finding.level for report in reports)
    parts = [plural(counts[level], level) for level in reversed(LEVELS[1:]) if counts[level]]
    return f"{len(reports)} checks: {', '.join(parts) or 'nothing to say'}"


def plural(count: int, word: str) -> str:
    """`2 errors`"""
    return f"{count} {word}{'' if count == 1 else 's'}"
