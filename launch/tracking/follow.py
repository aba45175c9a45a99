"""Follows the files of a run while they grow, and sends each step to a tracker once.

A step's rollouts are in rollouts.jsonl before its row is in metrics.jsonl. A resumed run writes some of its last steps
again. They are the same steps, and are not sent twice. (After `resume --resample-step` they differ, and the tracker
keeps the first ones, because trackers take steps in order only.)
A line that cannot be read is skipped, as in the display.
"""

import math
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from launch.tracking.trackers import Tracked, Tracker
from shared.config.processes import TrackingConfig
from shared.run.files import write_whole
from shared.run.growing_file import GrowingFile
from shared.run.metrics import Row, parsed
from shared.run.rollout_index import RolloutIndex
from shared.run.rollouts import RolloutGroup
from shared.run.run_dir import RunDir

SEND_EVERY_S = 5.0
"""By the clock, for all trackers. Several steps go together, because each write of a tracker has a cost of its own."""
LOOK_EVERY_S = 0.2
"""How often it checks whether it was asked to stop."""
GROUPS = 2
"""Of a step that are sent: hundreds of completions a step would not be read there. rollouts.jsonl has all."""
GROUPS_EVERY_S = 5.0
"""Of the run's time: groups cost a tracker more than figures, and nobody reads those of ten steps a second."""
ID_DIGITS = 8
"""Of the run's id in the tracked run's name: folders in two places may have the same name."""


def tracked_run(run: RunDir, config: TrackingConfig) -> Tracked:
    """As it was when the run was first tracked, unless another tracker or project is asked for now."""
    run_id = run.read_info().run_id
    name = config.name or f"{run.path.resolve().name}-{run_id[:ID_DIGITS]}"
    asked = Tracked(kind=config.kind, project=config.project, name=name, run_id=run_id)
    known = noted(tracking_file(run)) or asked
    same = (known.kind, known.project) == (asked.kind, asked.project) and config.name in ("", known.name)
    return known if same else asked


def tracking_file(run: RunDir) -> Path:
    return run.path / "tracking.json"


def noted(file: Path) -> Tracked | None:
    """None if there is none, or if a crash has damaged it."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=Tracked)
    except (OSError, ValueError, RecursionError):
        return None


def note_tracked(run: RunDir, tracked: Tracked) -> None:
    write_whole(tracking_file(run), msgspec.json.format(msgspec.json.encode(tracked), indent=2), durable=False)


def wait(seconds: float, stop: Callable[[], bool]) -> None:
    """Returns earlier if it is asked to stop."""
    end = time.monotonic() + seconds
    while not stop() and time.monotonic() < end:
        time.sleep(min(seconds, LOOK_EVERY_S))


class MetricsSender:
    """What of a run has been sent."""

    def __init__(self, run: RunDir, tracker: Tracker, last_step: int) -> None:
        """last_step: later ones are sent."""
        self.tracker = tracker
        self.metrics = GrowingFile(run.metrics)
        self.rollouts = RolloutIndex(run.rollouts)
        self.last_step = last_step
        self.groups_at = -math.inf
        """Time of the run when the last sent groups were trained on."""

    def send_until(self, stop: Callable[[], bool], every_s: float = SEND_EVERY_S) -> None:
        """Send what there is, until asked to stop; then the rest."""
        stopping = False
        while not stopping:
            # Asked first: what was written before the request is read after it.
            stopping = stop()
            self.send_new_steps()
            wait(every_s, stop)

    def send_new_steps(self) -> None:
        for line in self.metrics.new_lines():
            self.send(parsed(line) or {})

    def send(self, row: Row) -> None:
        step = int(row.get("step") or 0)
        if step <= self.last_step:
            return
        figures = {name: figure for name, figure in row.items() if name != "step" and figure is not None}
        self.tracker.log(step, figures, self.groups(step, row.get("time_s")))
        self.last_step = step

    def groups(self, step: int, time_s: float | None) -> list[RolloutGroup]:
        """Of a step at this time of the run; empty if the last ones were a moment ago."""
        if time_s is not None:
            if abs(time_s - self.groups_at) < GROUPS_EVERY_S:
                return []
            self.groups_at = time_s
        numbers = list(self.rollouts.heads(step))[:GROUPS]
        return [group for number in numbers if (group := self.rollouts.group(step, number))]
