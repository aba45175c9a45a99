"""Where a run is tracked: trackio, Weights & Biases, or TensorBoard, behind one small protocol.

    trackio       local; metrics, and rollouts as traces. Kept where trackio keeps them (TRACKIO_DIR)
    wandb         metrics; RUN/wandb. Online with a login, offline without one, or as WANDB_MODE says
    tensorboard   metrics; RUN/tensorboard

Metrics have the names of metrics.jsonl. A figure that was not measured (null) is left out.
`last_step` is what makes a restart harmless: rows up to it are not sent again. trackio and TensorBoard are asked what
they have, so one that has lost it gets it again. Weights & Biases can be asked only online, and trackio only about this
machine; otherwise what was noted counts. Offline the rows since the last clean end are sent again with the same run id
and the same step, and `wandb sync` takes each step once.
Left out on purpose: system metrics of trackers (mem/ and time/ are in metrics.jsonl), their code and console capture,
and rollouts in the other two, which have no view for them.
"""

import importlib.util
import logging
import os
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import msgspec

from protocol.plain_text import for_log
from shared.config.processes import TrackingConfig
from shared.errors import ConfigError
from shared.run.rollouts import RolloutGroup, RolloutSample
from shared.run.run_dir import RunDir

log = logging.getLogger("tracker")


class Tracked(msgspec.Struct, frozen=True, kw_only=True):
    """tracking.json: where this run is tracked. It stays the same if the run's folder is renamed."""

    kind: str
    """Which tracker."""
    project: str
    """Project there."""
    name: str
    """Name of the run there."""
    run_id: str
    """Id of the run there, where it has one."""
    step: int = 0
    """Last step that the tracker had when it was last closed."""
    evaluated: tuple[int, ...] = ()
    """Versions whose evaluation it has."""


class Tracker(Protocol):
    """Takes the rows of one run, in the order of their steps."""

    def last_step(self) -> int | None:
        """The last step that it has; 0 for none, None if it cannot be asked."""
        ...

    def log(self, step: int, figures: Mapping[str, float], rollouts: Sequence[RolloutGroup]) -> None: ...

    def add(self, step: int, figures: Mapping[str, float], time_s: float) -> None:
        """Figures that came after the row of their step. time_s: of the run."""
        ...

    def close(self) -> None:
        """Returns when everything logged is safe."""
        ...


class Trackio:
    """A local trackio project; it writes to its database twice a second."""

    def __init__(self, tracked: Tracked, config: dict[str, Any]) -> None:
        import trackio  # pyright: ignore[reportMissingImports]
        from trackio.sqlite_storage import SQLiteStorage  # pyright: ignore[reportMissingImports]

        self.trace = trackio.Trace
        self.known = SQLiteStorage.get_max_step_for_run(tracked.project, tracked.name) or 0
        self.run = trackio.init(
            project=tracked.project,
            name=tracked.name,
            config=config,
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def last_step(self) -> int | None:
        # Rows that went to a Space or a server are not on this machine.
        is_remote = os.environ.get("TRACKIO_SPACE_ID") or os.environ.get("TRACKIO_SERVER_URL")
        return None if is_remote else self.known

    def log(self, step: int, figures: Mapping[str, float], rollouts: Sequence[RolloutGroup]) -> None:
        traces = {
            f"rollout/{number}/{index}": self.trace(**conversation(group, sample))
            for number, group in enumerate(rollouts)
            for index, sample in enumerate(group.samples)
        }
        self.run.log({**figures, **traces}, step=step)

    def add(self, step: int, figures: Mapping[str, float], time_s: float) -> None:
        self.run.log(dict(figures), step=step)

    def close(self) -> None:
        self.run.finish()


def conversation(group: RolloutGroup, sample: RolloutSample) -> dict[str, Any]:
    """A completion as the messages and the metadata of a trace."""
    return {
        "messages": [
            {"role": "user", "content": group.prompt},
            {"role": "assistant", "content": sample.text},
        ],
        "metadata": {"group_id": group.group_id, "fate": group.fate, "advantage": sample.advantage}
        | {key: getattr(sample, key) for key in ("outcome", "reward", "rewards", "finish")},
    }


class Wandb:
    """A run of Weights & Biases."""

    def __init__(self, tracked: Tracked, config: dict[str, Any], folder: Path) -> None:
        import wandb  # pyright: ignore[reportMissingImports]
        from wandb.errors import UsageError  # pyright: ignore[reportMissingImports]

        begin = partial(
            wandb.init,
            project=tracked.project,
            name=tracked.name,
            id=tracked.run_id,
            resume="allow",
            dir=folder,
            config=config,
            settings=wandb.Settings(console="off", disable_git=True, disable_code=True, x_disable_stats=True),
        )
        try:
            self.run = begin()
        except UsageError as error:  # without a login, which nobody is here to give
            log.warning(
                "Weights & Biases takes nothing yet (%s), so everything is kept in RUN/wandb; after `wandb login`,"
                " `wandb sync` sends it, and so does the next start of the run",
                for_log(str(error)),
            )
            self.run = begin(mode="offline")
        if self.run.disabled:
            raise ConfigError(
                "Weights & Biases is disabled (WANDB_MODE or `wandb disabled`) and would take nothing; enable it, set"
                " WANDB_MODE=offline to keep everything in RUN/wandb, or set tracking.kind to 'none'."
            )

    def last_step(self) -> int | None:
        if self.run.offline:
            return None
        return self.run.step - 1 if self.run.resumed else 0

    def log(self, step: int, figures: Mapping[str, float], rollouts: Sequence[RolloutGroup]) -> None:
        # commit: a row stays open until the next one begins, and a killed process would lose it.
        self.run.log(dict(figures), step=step, commit=True)

    def add(self, step: int, figures: Mapping[str, float], time_s: float) -> None:
        # A step that has its row takes no more figures. The summary has the newest of each.
        self.run.summary.update(dict(figures))

    def close(self) -> None:
        self.run.finish()


class TensorBoard:
    """Event files; each start of the process begins one more."""

    def __init__(self, folder: Path, began: float) -> None:
        """began: when the run began, in seconds since 1970. Rows have their times from there, also if sent later."""
        from tensorboard.compat.proto import event_pb2, summary_pb2  # pyright: ignore[reportMissingImports]
        from tensorboard.summary.writer.event_file_writer import (  # pyright: ignore[reportMissingImports]
            EventFileWriter,
        )

        self.began = began
        self.known = max(map(last_event_step, sorted(folder.glob("events.*"))), default=0)
        # Generated modules, whose classes type checkers do not see.
        self.event: Any = event_pb2.Event  # pyright: ignore[reportAttributeAccessIssue]
        self.summary: Any = summary_pb2.Summary  # pyright: ignore[reportAttributeAccessIssue]
        self.writer = EventFileWriter(str(folder), flush_secs=2)

    def last_step(self) -> int | None:
        return self.known

    def log(self, step: int, figures: Mapping[str, float], rollouts: Sequence[RolloutGroup]) -> None:
        self.add(step, figures, figures.get("time_s", 0.0))

    def add(self, step: int, figures: Mapping[str, float], time_s: float) -> None:
        values = [self.summary.Value(tag=name, simple_value=figure) for name, figure in figures.items()]
        event = self.event(step=step, wall_time=self.began + time_s, summary=self.summary(value=values))
        self.writer.add_event(event)

    def close(self) -> None:
        self.writer.close()


def last_event_step(file: Path) -> int:
    """A record that a killed process has torn ends the file."""
    from tensorboard.backend.event_processing.event_file_loader import (  # pyright: ignore[reportMissingImports]
        EventFileLoader,
    )

    return max((event.step for event in EventFileLoader(str(file)).Load()), default=0)


def check_tracker(config: TrackingConfig) -> None:
    """ConfigError if its package is not installed. Nothing is imported."""
    if config.kind != "none" and importlib.util.find_spec(config.kind) is None:
        raise ConfigError(
            f"tracking.kind = '{config.kind}' needs a package that is not installed; install it with"
            f" `pip install -e '.[{config.kind}]'`, or set tracking.kind to 'none'."
        )


def make_tracker(tracked: Tracked, run: RunDir, config: dict[str, Any]) -> Tracker:
    """config: of the run, to be shown beside its metrics."""
    match tracked.kind:
        case "trackio":
            return Trackio(tracked, config)
        case "wandb":
            return Wandb(tracked, config, run.path)
        case _:
            began = datetime.fromisoformat(run.read_info().created).timestamp()
            return TensorBoard(run.path / "tensorboard", began)
