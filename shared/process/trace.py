"""A trace of a run: when each process waited, decoded, scored and updated. https://ui.perfetto.dev shows it.

    with trace.phase("decode"): ...

    logs/trace-learner.json    of one process: an event a line, written as it happens; opens also while the run goes on
    trace.json                 of all processes, put together when the run ends, however it ends

The format is Chrome's list of trace events: a phase begins (`B`) and ends (`E`), phases inside it are nested, times are
in microseconds since 1970. Each start of a process has a track of its own. A line is written with one call, so a kill
cuts off no more than the end of a phase, and viewers draw such a phase to the end of the trace. The file of a process
is a list without its last bracket, which the format allows; trace.json is complete.

The clock within a process is the monotonic one, set once by the system's, so that no correction of that clock turns a
phase around. Left out on purpose: counters, arrows between tracks, and clocks of other machines.
"""

import json
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Protocol

from shared.run.files import AppendFile, drop_torn_line, write_whole
from shared.run.run_dir import RunDir

BEGIN = b"[\n"
TRACK_LIMIT = 2**31
"""The numbers of tracks are below it, since viewers read them as process ids."""


class Trace(Protocol):
    """Where phases are noted."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        """It lasts for the block."""
        ...


class NoTrace:
    """Notes nothing."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()


NO_TRACE = NoTrace()


class TraceFile:
    """The trace of one process, behind those of its earlier starts."""

    def __init__(self, path: Path, process: str) -> None:
        if path.exists():
            drop_torn_line(path)
        self.file = AppendFile(path)
        if self.file.end == 0:
            self.file.append(BEGIN)
        self.offset_ns = time.time_ns() - time.monotonic_ns()
        # From the time of the start: in two containers two processes may have the same id.
        self.track = time.time_ns() // 1000 % TRACK_LIMIT
        self.append("M", "process_name", args={"name": process})

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.append("B", name)
        try:
            yield
        finally:
            self.append("E", name)

    def append(self, kind: str, name: str, **more: Any) -> None:
        microseconds = (time.monotonic_ns() + self.offset_ns) / 1000
        event = {"ph": kind, "name": name, "pid": self.track, "tid": self.track, "ts": microseconds, **more}
        self.file.append(json.dumps(event).encode() + b",\n")


def open_trace(run: Path | None, process: str, *, wanted: bool) -> Trace:
    """run: its directory; without one there is no trace."""
    return TraceFile(RunDir(run).trace_of(process), process) if wanted and run else NO_TRACE


def join_traces(run: RunDir) -> Path:
    """Write trace.json from the traces of all processes; returns it."""
    events = [event for file in sorted(run.logs.glob("trace-*.json")) for event in read_events(file)]
    events.sort(key=lambda event: event["ts"])
    whole = {"displayTimeUnit": "ms", "traceEvents": events}
    write_whole(run.trace, json.dumps(whole, separators=(",", ":")).encode(), durable=False)
    return run.trace


def read_events(file: Path) -> Iterator[dict[str, Any]]:
    """Those of one process. The last line may be torn, if the process was killed and did not start again."""
    for line in file.read_bytes().splitlines(keepends=True):
        if line.endswith(b",\n"):
            yield json.loads(line[:-2])
