"""Real runs for the integration tests: the command line in a process of its own, on a small version of the preset."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
SMALL = {
    "run.steps": 6,
    "rollout.prompts": 4,
    "rollout.group": 4,
    "rollout.max_new_tokens": 24,
    "checkpoint.every": 2,
    "eval.problems": 0,
    "compute.learner_threads": 1,
    "compute.actor_threads": 1,
    "link.heartbeat_s": 0.2,
}


def launch(*words: str | Path, wait_s: float = 240.0) -> subprocess.CompletedProcess[str]:
    """`python -m launch ...`, to its end."""
    argv = [sys.executable, "-m", "launch", *map(str, words)]
    return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=wait_s, stdin=subprocess.DEVNULL)


def start(*words: str | Path) -> subprocess.Popen[str]:
    """`python -m launch ...`, in the background."""
    argv = [sys.executable, "-m", "launch", *map(str, words)]
    return subprocess.Popen(
        argv,
        cwd=ROOT,
        text=True,
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def sets(overrides: dict[str, Any]) -> list[str]:
    """`--set key=value` for each."""
    return [word for key, value in overrides.items() for word in ("--set", f"{key}={json.dumps(value)}")]


def train(out: Path, **overrides: Any) -> dict[str, Any]:
    """A small run to its end; its summary."""
    done = launch("run", "embedded", "--out", out, *sets(SMALL | dotted(overrides)))
    assert done.returncode == 0, done.stdout + done.stderr
    return summary(out)


def dotted(overrides: dict[str, Any]) -> dict[str, Any]:
    """`run__steps=3` -> `run.steps`"""
    return {key.replace("__", "."): value for key, value in overrides.items()}


def summary(out: Path) -> dict[str, Any]:
    """summary.json"""
    return json.loads((out / "summary.json").read_text())


def rows(out: Path) -> list[dict[str, Any]]:
    """metrics.jsonl"""
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def num_rows(out: Path) -> int:
    """Steps logged so far."""
    return len(rows(out)) if (out / "metrics.jsonl").exists() else 0


def wait_until(condition: Callable[[], bool], what: str = "what a test waits for", seconds: float = 120.0) -> None:
    """Poll until it holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"{what} did not happen within {seconds} s"
        time.sleep(0.02)


def processes_of(out: Path, module: str) -> list[int]:
    """Process ids of `python -m <module> --run <out>`."""
    found: list[int] = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            words = command_line(folder)
            if f"-m {module} --run {out}" in words:
                found.append(int(folder.name))
    return found


def command_line(folder: Path) -> str:
    """Empty for a process that has just ended."""
    try:
        return (folder / "cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def alive(pid: int) -> bool:
    """A process that is gone, or dead and not yet collected by its parent, is not alive."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def free_port() -> int:
    """A port of this machine on which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        return found.getsockname()[1]


def kill(pids: Sequence[int]) -> None:
    """SIGKILL. One may have ended since it was looked up."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def replayed(out: Path) -> dict[str, Any]:
    """The last line of `replay`, which must match."""
    done = launch("replay", out)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1])
