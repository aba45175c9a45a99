"""What the rules see of a run: its rows of metrics, evaluations, configuration, and a few facts from other files.

    early    the first third of the steps, from 3 to 10
    late     the last third, from 3 to 10
    z        (late - early) / sqrt(se(late)^2 + se(early)^2)

The standard error of a window is the larger of what its steps show and what sampling alone makes, reward/std over the
root of its groups: completions of one prompt are alike, so a group counts once. Nothing is written. A row that cannot
be read, or a file that is being replaced at this moment, does not count: `why` may look at a run that goes on.
Left out on purpose: smoothing and fits. Two means and their difference can be checked by hand.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from safetensors import SafetensorError
from safetensors.numpy import load_file

from launch.display.watch import goal, known, mean, step_of, steps_done, value
from shared.config.tree import Config
from shared.run.evaluation import Evaluation
from shared.run.file_lock import is_locked
from shared.run.metrics import Row
from shared.run.reader import Run, SavedStep, State

SHORTEST, LONGEST = 3, 10
"""Steps in a window."""
REWARD = "reward/mean"
SURE_Z = 3.0
"""A change that chance makes once in 700 runs; with two, one run in twenty would be told something untrue."""


@dataclass(frozen=True, kw_only=True)
class Saved:
    """What the adapter of a checkpoint shows."""

    step: int
    """Steps that it has seen."""
    zero: int
    """LoRA-B matrices that are exactly zero."""
    matrices: int
    """All LoRA-B matrices."""


@dataclass(frozen=True, kw_only=True)
class RunView:
    """A run as its files tell of it."""

    config: Config
    """As in config.json."""
    rows: Sequence[Row] = ()
    """One for each step."""
    state: State = "new"
    in_use: bool = False
    """Whether a process has its lock."""
    evaluations: Sequence[Evaluation] = ()
    """Of the same held-out tasks, the oldest policy first."""
    refused: Sequence[int] = ()
    """Steps of the batches in quarantine/."""
    saved: Saved | None = None
    """Of the newest checkpoint, if there is one."""
    error: str = ""
    """The sentence with which it failed, without its full stop; empty if it ended otherwise or goes on."""
    begun: bool = True
    """Whether it has anything that would be lost."""

    @property
    def window(self) -> int:
        return max(SHORTEST, min(LONGEST, len(self.rows) // 3))

    @property
    def early(self) -> Sequence[Row]:
        return self.rows[: self.window]

    @property
    def late(self) -> Sequence[Row]:
        return self.rows[-self.window :]

    def was(self, key: str) -> float:
        """Mean of the first window; NaN if it was not measured there."""
        return mean(self.early, key)

    def now(self, key: str) -> float:
        """Mean of the last window."""
        return mean(self.late, key)

    @property
    def idle(self) -> float:
        """Share of groups without a difference, in the last window."""
        return ratio(self.now("groups/idle"), self.now("groups/total"))

    @property
    def updates(self) -> int:
        """Steps that changed the policy."""
        return self.updates_until(steps_done(self.rows))

    def updates_until(self, step: int) -> int:
        """As many as a checkpoint of this step has seen."""
        return sum(not math.isnan(value(row, "grad_norm")) for row in self.rows if step_of(row) <= step)

    def z(self, key: str = REWARD) -> float:
        """Change from the first to the last window in standard errors; 0 if there are too few steps for two."""
        if len(self.rows) < 2 * SHORTEST:
            return 0.0
        error = math.hypot(standard_error(self.early, key), standard_error(self.late, key))
        change = self.now(key) - self.was(key)
        return 0.0 if math.isnan(change) or change == 0 else change / max(error, 1e-9)

    @property
    def gain(self) -> float:
        """z of what training is about: the reward, or minus the loss of a warm start, which has no rewards."""
        return self.z() if goal(self.rows) == REWARD else -self.z(goal(self.rows))

    @property
    def rises(self) -> bool:
        return self.gain >= SURE_Z

    @property
    def falls(self) -> bool:
        return self.gain <= -SURE_Z


def ratio(part: float, whole: float) -> float:
    """NaN where there is no whole."""
    return part / whole if whole > 0 else math.nan


def standard_error(rows: Sequence[Row], key: str) -> float:
    found = known(rows, key)
    if len(found) < 2:
        return math.inf
    sampled = [value(row, "reward/std") ** 2 / value(row, "groups/total") for row in rows if value(row, "groups/total")]
    chance = statistics.fmean(sampled) if key == REWARD and sampled else 0.0
    variance = max(statistics.variance(found), 0.0 if math.isnan(chance) else chance)
    return math.sqrt(variance / len(found))


def view_of(run: Run) -> RunView:
    summary = run.summary()
    error = summary.error.rstrip(".") if summary else ""
    return RunView(
        config=run.config(),
        rows=run.metrics.rows(),
        state=run.state(),
        in_use=is_locked(run.files.lock),
        evaluations=of_training(run.evaluations()),
        refused=[batch.step for batch in run.quarantine()],
        saved=newest_saved(run.checkpoints()),
        error=error,
        begun=not error or run.files.has_begun(),
    )


def of_training(evaluations: Sequence[Evaluation]) -> tuple[Evaluation, ...]:
    """Those of the run itself on its first tasks, without `eval --test` or other tasks."""
    found = [one for one in evaluations if one.in_curve]
    return tuple(one for one in found if one.tasks_sha256 == found[0].tasks_sha256)


def newest_saved(checkpoints: Sequence[SavedStep]) -> Saved | None:
    if not checkpoints:
        return None
    newest = checkpoints[-1]
    try:
        tensors = load_file(newest.path / "adapter_model.safetensors")
    except (OSError, SafetensorError):
        return None
    matrices = [tensor for name, tensor in tensors.items() if "lora_B" in name]
    zero = sum(not matrix.any() for matrix in matrices)
    return Saved(step=newest.step, zero=zero, matrices=len(matrices)) if matrices else None
