"""Follows the files of a run while they grow, and sends each step to a tracker once.

A step's rollouts are in rollouts.jsonl before its row is in metrics.jsonl. A resumed run writes some of its last steps
again. They are the same steps, and are not sent twice. (After `resume --resample-step` they differ, and the tracker
keeps the first ones, because trackers take steps in order only.)
A row shows an evaluation that came before it. At the end, those that no row has shown are read from eval/.
A line that cannot be read is skipped, as in the display.
"""

import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
from msgspec.structs import replace

from launch.tracking.trackers import Tracked, Tracker
from shared.config.processes import TrackingConfig
from shared.run.evaluation import figures
from shared.run.files import write_whole
from shared.run.growing_file import GrowingFile
from shared.run.metrics import NAMED, Row, parsed
from shared.run.reader import Run
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


def tracked_run(run: RunDir, config: TrackingConfig, environment: Mapping[str, str]) -> Tracked:
    """As it was when the run was first tracked, unless another tracker, project or name is asked for now.
    environment: WANDB_PROJECT and WANDB_NAME count where the configuration has its defaults."""
    run_id = run.read_info().run_id
    known = noted(tracking_file(run))
    if known and still_fits(known, config):
        return known
    config = with_wandb_environment(config, environment)
    name = f"{run.path.resolve().name}-{run_id[:ID_DIGITS]}" if not config.name else name_in_tracker(config, run_id)
    return Tracked(kind=config.kind, project=config.project, name=name, run_id=run_id)


def still_fits(known: Tracked, config: TrackingConfig) -> bool:
    """Whether the run goes on where it was tracked. A name or project from the environment stays, whatever the
    environment says now."""
    open_project = config.kind == "wandb" and config.project == TrackingConfig().project
    same_project = known.project == config.project or open_project
    same_name = config.name in ("", known.name) or known.name == name_in_tracker(config, known.run_id)
    return known.kind == config.kind and same_project and same_name


def with_wandb_environment(config: TrackingConfig, environment: Mapping[str, str]) -> TrackingConfig:
    if config.kind != "wandb":
        return config
    default = TrackingConfig()
    project = environment.get("WANDB_PROJECT") if config.project == default.project else None
    name = environment.get("WANDB_NAME") if config.name == default.name else None
    return replace(config, project=project or config.project, name=name or config.name)


def name_in_tracker(config: TrackingConfig, run_id: str) -> str:
    """trackio has no ids: a second run of the same name would be taken for the first."""
    return f"{config.name}-{run_id[:ID_DIGITS]}" if config.kind == "trackio" else config.name


def corrected_by_tracker(tracked: Tracked, last_step: int | None) -> Tracked:
    """With the step after which rows are sent. last_step: that the tracker has; None if it cannot be asked, so what was
    noted counts. One that has lost steps gets them again, and the evaluations too."""
    if last_step is None:
        return tracked
    return replace(tracked, step=last_step, evaluated=tracked.evaluated if last_step >= tracked.step else ())


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
    """Sends rows and evaluations of a run, and knows which were sent."""

    def __init__(self, run: RunDir, tracker: Tracker, before: Tracked) -> None:
        """before: what the tracker has already."""
        self.run = run
        self.tracker = tracker
        self.before = before
        self.metrics = GrowingFile(run.metrics)
        self.rollouts = RolloutIndex(run.rollouts)
        self.last_step = before.step
        self.time_s = 0.0
        """Of the newest row."""
        self.evaluated = set(before.evaluated)
        """Versions whose evaluation was sent, with a row or without one."""
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
        self.time_s = row.get("time_s") or self.time_s
        version = row.get("eval/step")
        # In a file that was written again (its generation is above 0), a row that was sent before may show another
        # evaluation than it did.
        if version is not None and (step > self.last_step or not self.metrics.generation):
            self.evaluated.add(int(version))
        if step <= self.last_step:
            return
        found = {name: figure for name, figure in row.items() if name != "step" and figure is not None}
        self.tracker.log(step, found, self.groups(step, row.get("time_s")))
        self.last_step = step

    def send_unshown_evaluations(self) -> None:
        """Those that no row has shown. No row follows the last one."""
        found = {one.version: one for one in Run(self.run.path).evaluations() if one.in_curve}
        for version in sorted(found.keys() - self.evaluated):
            named = {NAMED["evaluated"].format(name): figure for name, figure in figures(found[version]).items()}
            self.tracker.add(version, named, self.time_s)
            self.evaluated.add(version)

    def tracked(self) -> Tracked:
        """What the tracker has now."""
        return replace(self.before, step=self.last_step, evaluated=tuple(sorted(self.evaluated)))

    def groups(self, step: int, time_s: float | None) -> list[RolloutGroup]:
        """Of a step at this time of the run; empty if the last ones were a moment ago."""
        if time_s is not None:
            if abs(time_s - self.groups_at) < GROUPS_EVERY_S:
                return []
            self.groups_at = time_s
        numbers = list(self.rollouts.heads(step))[:GROUPS]
        return [group for number in numbers if (group := self.rollouts.group(step, number))]
