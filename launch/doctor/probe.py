"""Start a probe and read what it says, at most for so long.

A probe is a program that prints one JSON object a stage. It runs in a session of its own, so that all of it can be
killed, and writes to a file instead of a pipe, which a stray grandchild could hold open for ever. A probe that ends
early has still told the stages it finished, and how it ended stands in `trouble`.
"""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO

from shared.lifeline import PARENT_PID

MAX_OUTPUT_BYTES = 2**20


@dataclass(frozen=True, kw_only=True)
class Told:
    """What a probe said."""

    lines: tuple[bytes, ...]
    """One JSON object a finished stage."""
    trouble: str
    """How it went wrong; empty if it ended as it should."""


def ask(module: str, arguments: Sequence[str], limit_s: float) -> Told:
    """Run `python -m module arguments`."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
            env=os.environ | {PARENT_PID: str(os.getpid())},
        )
        trouble = wait(process, limit_s)
        lines = tuple(line for line in read(out).splitlines() if line.startswith(b"{"))
        return Told(lines=lines, trouble=trouble and with_last_words(trouble, read(err)))


def wait(process: subprocess.Popen[bytes], limit_s: float) -> str:
    """How it ended, in words; empty for well."""
    try:
        code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return f"no answer within {limit_s:g} s"
    if code < 0:
        return f"killed by signal {-code} ({signal.strsignal(-code)})"
    return f"exit code {code}" if code else ""


def read(file: IO[bytes]) -> bytes:
    """From its start, within reason."""
    file.seek(0)
    return file.read(MAX_OUTPUT_BYTES)


def with_last_words(trouble: str, errors: bytes) -> str:
    """The last line on stderr, where a traceback says what it is about."""
    lines = errors.decode(errors="replace").strip().splitlines()
    return f"{lines[-1].strip()[:300]} ({trouble})" if lines else trouble
