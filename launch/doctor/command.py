"""`doctor`: look, judge, tell. Exit 0 without an error, 1 with one, 2 for bad arguments; warnings change nothing.

    {"doctor": 1, "time": ..., "host": ..., "config": ..., "run_dir": ..., "errors": 0,
     "findings": [{"check": "disk.speed", "level": "ok", "found": ..., "remedy": ""}, ...]}

is what `--json` prints; names of checks stay what they are. Nothing is installed, mended or left behind.
"""

import json
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from launch.commands.run import default_folder
from launch.doctor.examine import Report, examine
from launch.doctor.machine import gather
from shared.config.load import apply_override, config_from_json, config_to_json, load_config, resolve
from shared.config.tree import Config
from shared.run.run_dir import RunDir

FORMAT = 1
DEFAULT_SOURCE = "embedded"


def run_command(*, source: str | None, overrides: Sequence[str], out: Path | None, as_json: bool) -> int:
    """The exit code."""
    chosen = choose_source(source, out)
    config = read_config(chosen, overrides)
    run_dir = out or default_folder(str(chosen), datetime.now())
    reports = examine(gather(config, run_dir))
    if as_json:
        print(json.dumps(as_tree(str(chosen), run_dir, reports), indent=2))
    else:
        from launch.display.console import make_console
        from launch.doctor.show import show

        show(make_console(None), str(chosen), run_dir, reports)
    return 1 if num_errors(reports) else 0


def choose_source(source: str | None, out: Path | None) -> str | Path:
    """As typed; without a source, the config.json of a run that exists, else the first run's preset."""
    own = RunDir(out).config if out is not None and RunDir(out).config.is_file() else None
    return source or own or DEFAULT_SOURCE


def read_config(chosen: str | Path, overrides: Sequence[str]) -> Config:
    """A preset or TOML file as `run` reads it, a run's own JSON as `resume` does."""
    if isinstance(chosen, str):
        return load_config(chosen, overrides)
    tree = json.loads(config_to_json(config_from_json(chosen.read_bytes())))
    for override in overrides:
        apply_override(tree, override)
    return resolve(tree)


def as_tree(source: str, run_dir: Path, reports: Sequence[Report]) -> dict[str, object]:
    """What --json prints."""
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


def num_errors(reports: Sequence[Report]) -> int:
    """How many findings would stop a run."""
    return sum(report.finding.level == "error" for report in reports)
