"""A run that is disturbed again and again and continued each time, and the result it must have."""

import hashlib
import json
import os
import shutil
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from shared.run.failpoints import Fault, mark
from tests.chaos.start import Kill, Start, run_once

SPARE_STARTS = 5
"""A fault costs one restart at most; a run that fails again and again has another cause."""
UNEQUAL = ("time", "mem/", "energy/", "tokens_per_s")
"""Beginnings of the metrics that two runs may differ in."""


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One trial."""

    name: str
    """Also the folder it runs in."""
    run: str
    """A prepared run, which is copied."""
    faults: tuple[Fault, ...] = ()
    """What goes wrong inside."""
    kills: tuple[Kill, ...] = ()
    """What goes wrong from outside."""
    trace: bool = False
    """Whether to note every point that is passed."""
    disk: str = ""
    """Folder to run in, where it is not the host's own."""
    keep: str = ""
    """Where to copy the finished run to."""

    def happened(self, result: "Result") -> list[Fault]:
        """The faults that happened."""
        return [fault for n, fault in enumerate(self.faults) if n not in result.missed]


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it."""

    name: str
    """Of the trial."""
    error: str = ""
    """What went wrong in the trial itself; empty if it came to its end."""
    outcome: dict[str, Any] = {}
    """What must be equal in all trials."""
    starts: tuple[tuple[int, str], ...] = ()
    """Exit code and last words of each."""
    kills: int = 0
    """Kills from outside that hit."""
    missed: tuple[int, ...] = ()
    """Numbers of faults that did not happen."""
    passed: tuple[str, ...] = ()
    """Points, the run's own path cut off, in the order in which they were passed."""


def run_trial(trial: Trial, folder: Path) -> Result:
    """Go on until the run is done."""
    run, plan = (Path(trial.disk) if trial.disk else folder) / "run", folder / "plan"
    shutil.copytree(trial.run, run)
    plan.mkdir()
    faults = [msgspec.structs.replace(fault, point=fault.point.replace("{run}", str(run))) for fault in trial.faults]
    (plan / "plan.json").write_bytes(msgspec.json.encode({"faults": faults, "trace": trial.trace}))
    kills, starts = list(trial.kills), list[Start]()
    while not starts or starts[-1].code != 0 or json.loads((run / "summary.json").read_text())["status"] != "done":
        assert len(starts) < len(faults) + len(trial.kills) + SPARE_STARTS, (
            f"not done after {len(starts)} starts: {starts[-1]}"
        )
        starts.append(run_once(run, folder / "launcher.log", {"TANDEM_FAILPOINTS": str(plan)}, kills))
        assert starts[-1].code in (0, 1, 2, -9), starts[-1]
    if trial.keep:
        shutil.copytree(run, trial.keep)
    passed = (plan / "passed").read_text().replace(str(run), "{run}").splitlines() if trial.trace else []
    return Result(
        name=trial.name,
        outcome=outcome(run),
        starts=tuple((one.code, one.sentence) for one in starts),
        kills=sum(one.kills for one in starts),
        missed=tuple(n for n in range(len(faults)) if not mark(plan, n).exists()),
        passed=tuple(passed),
    )


def check(result: Result, undisturbed: Result) -> None:
    """As if nothing had happened."""
    assert not result.error, f"{result.name}: {result.error}"
    assert result.outcome == undisturbed.outcome, f"{result.name}: {result.starts}"


def outcome(run: Path) -> dict[str, Any]:
    """All of a finished run that must not depend on what it went through."""
    from learner.durable.journal import Journal
    from learner.durable.recorder import orders_in, ranks_from, read
    from shared.process.lease import LEASE_BYTE
    from shared.run.file_lock import open_lock, try_byte, try_lock

    summary = json.loads((run / "summary.json").read_text())
    best = run / "checkpoints" / "best.json"
    payloads = Journal.read(run / "journal").records()
    packed = [one for payload in payloads if not ranks_from(payload) for one in orders_in(payload).values()]
    ids = Counter(group.group_id for one in packed for group in read(one).groups)
    for lock, take in ((run / "lock", try_lock), (run / "lease" / "lock", partial(try_byte, place=LEASE_BYTE))):
        fd = open_lock(lock)
        assert take(fd), f"{lock} is still locked"
        os.close(fd)
    return {
        "status": summary["status"],
        "steps": summary["steps"],
        "adapter_sha256": summary["adapter_sha256"],
        "groups": sorted(ids.items()),
        "metrics": [repeatable(row) for row in rows(run / "metrics.jsonl")],
        "rollouts": rows(run / "rollouts.jsonl"),
        "newest": contents(max((run / "checkpoints").glob("step-*"))),
        "best": best.read_text() if best.is_file() else None,
        "unfinished": sorted(str(path.relative_to(run)) for path in run.rglob(".*") if path.parent != run),
    }


def contents(folder: Path) -> dict[str, str]:
    """Digests of a checkpoint's files, but for those that tell the time."""
    files = (path for path in sorted(folder.iterdir()) if path.name not in ("state.json", "MANIFEST.json"))
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def rows(path: Path) -> list[dict[str, Any]]:
    """JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def repeatable(row: dict[str, Any]) -> dict[str, Any]:
    """A row of metrics without its times and sizes."""
    return {key: value for key, value in row.items() if not key.startswith(UNEQUAL)}
