"""A run directory that exists: its keys, and who is at work in it."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from protocol.errors import SecurityError
from protocol.security import load_learner_keys
from shared.file_lock import open_lock, signature, try_lock
from shared.run_dir import RunDir


@dataclass(frozen=True, kw_only=True)
class RunFolder:
    """What lies there."""

    state: Literal["new", "run", "other"]
    """Nothing, a run, or files of another kind."""
    keys_trouble: str
    """What is wrong with the keys; empty if nothing is, or there are none yet. `found; remedy`."""
    keys_mode: int | None
    """Permissions of the keys' folder; None if there is none."""
    lock_holder: str
    """Who writes this run; empty if nobody does."""
    lease_holder: str
    """Who computes in it; empty if nobody does."""


def look_at_run(path: Path) -> RunFolder:
    """Takes a free lock for an instant, and nothing else."""
    run = RunDir(path)
    is_run = run.config.is_file()
    return RunFolder(
        state="run" if is_run else "other" if holds_files(path) else "new",
        keys_trouble=keys_trouble(run.keys) if is_run else "",
        keys_mode=run.keys.stat().st_mode & 0o777 if run.keys.is_dir() else None,
        lock_holder=holder(run.lock),
        lease_holder=holder(run.lease),
    )


def holds_files(path: Path) -> bool:
    """The path is a file itself, or a folder with one somewhere below."""
    return path.is_file() or any(entry.is_file() for entry in path.rglob("*"))


def keys_trouble(keys: Path) -> str:
    """As a learner would find out."""
    try:
        load_learner_keys(keys)
    except SecurityError as error:
        return str(error)
    return ""


def holder(lock: Path) -> str:
    """Whoever has this lock, in words."""
    if not lock.is_file():
        return ""
    fd = open_lock(lock)
    try:
        return "" if try_lock(fd) else signature(fd)
    finally:
        os.close(fd)
