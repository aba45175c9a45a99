"""metrics.jsonl: one row per step, a contract with other tools.

The field names of the record are Python's, and the keys of the row are the contract's (`reward_mean` -> `reward/mean`).
A figure that was not measured, or is not finite, is NaN in the record and null in the row, because JSON has no NaN.
After a crash the rows of the steps that are done again are dropped, so each step has one row.

Readers get the file as columns while it grows:

    row of step s    {"step": s, "reward/mean": 0.7, "kl": null, ...}   ->   columns of float64; NaN: not measured

10,000 steps are 5 MB as columns, and ten times as much as rows, so rows are made of columns when they are asked for. A
line that cannot be read is skipped and counted. A file that was replaced, because a resumed run dropped rows, is read
again from its start. Left out on purpose: moving averages, and plots; whoever shows them makes them.
"""

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from protocol.messages import Outcome
from shared.run.files import BLOCK, LineLog
from shared.run.growing_file import GrowingFile

Row = Mapping[str, float | None]
"""The metrics of one step, as they are in the file."""
KEYS = {
    "reward_mean": "reward/mean",
    "reward_std": "reward/std",
    "reward_min": "reward/min",
    "reward_max": "reward/max",
    "groups_idle": "groups/idle",
    "groups_quarantined": "groups/quarantined",
    "groups_total": "groups/total",
    "advantage_mean": "advantage/mean",
    "advantage_std": "advantage/std",
    "advantage_min": "advantage/min",
    "advantage_max": "advantage/max",
    "entropy_mean": "entropy/mean",
    "selected_fraction": "selected/fraction",
    "ratio_mean": "ratio/mean",
    "clip_fraction": "clip/fraction",
    "importance_mean": "importance/mean",
    "importance_capped": "importance/capped",
    "importance_ess": "importance/ess",
    "stale_fraction": "stale/fraction",
    "mismatch_mean": "mismatch/mean",
    "mismatch_p95": "mismatch/p95",
    "mismatch_p99": "mismatch/p99",
    "mismatch_max": "mismatch/max",
    "length_mean": "length/mean",
    "turns_mean": "turns/mean",
    "rollout_s": "time/rollout_s",
    "verify_s": "time/verify_s",
    "swap_s": "time/swap_s",
    "update_s": "time/update_s",
    "idle_s": "time/idle_s",
    "step_s": "time/step_s",
    "actor_mb": "mem/actor_mb",
    "learner_mb": "mem/learner_mb",
    "weight_sum": "weight/sum",
    "penalised_fraction": "constraint/fraction",
    "penalised_kl": "constraint/kl",
    "constraint_loss": "constraint/loss",
    "noise_signal": "noise/signal",
    "noise_spread": "noise/spread",
    "ewc_penalty": "ewc/penalty",
    "teacher_kl": "teacher/kl",
    "policy_version": "policy/version",
    "curriculum_stage": "curriculum/stage",
    "curriculum_pass_rate": "curriculum/pass_rate",
    "curriculum_effective_tasks": "curriculum/effective_tasks",
}


NAMED = {
    "rewards": "reward/{}",
    "logged": "logged/{}",
    "card_mb": "mem/{}",
    "evaluated": "eval/{}",
    "actors": "actors/{}",
    "limited": "limited/{}",
    "energy": "energy/{}_j",
}
"""Field that holds figures by name -> key of each in a row."""


class StepMetrics(msgspec.Struct, frozen=True, kw_only=True, rename=KEYS):
    """One optimizer step. NaN if a figure was not measured."""

    step: int
    """Number of the step; `resume_at` compares with it."""
    time_s: float
    """Seconds since the run began, restarts included."""
    reward_mean: float
    """Mean reward of all N samples, those of idle groups too."""
    rewards: dict[str, float]
    """Mean of each part of the reward, unweighted; None counts as 0. Rows have `reward/<name>` for all of them."""
    logged: dict[str, float]
    """Means of what reward functions gave to log_metric. Rows have `logged/<name>` for those."""
    reward_std: float
    """Standard deviation of those N rewards."""
    reward_min: float
    """Smallest of them."""
    reward_max: float
    """Largest of them."""
    outcomes: dict[Outcome, float]
    """Share of the N samples with each outcome; one that is not named is 0. Rows have `outcome/<name>` for all."""
    groups_idle: int
    """Groups that teach nothing: their kept scores are all equal."""
    groups_quarantined: int
    """Groups in quarantine because their update was refused: all of the step, or none."""
    groups_total: int
    """Groups sampled, P and any replacements."""
    advantage_mean: float
    """Mean advantage of the samples that are trained on. NaN if there are none, like the next three."""
    advantage_std: float
    """Their standard deviation."""
    advantage_min: float
    """Smallest of them."""
    advantage_max: float
    """Largest of them."""
    entropy_mean: float
    """Nats per sampled token of the step. If the engine cannot measure it, it is the learner's own figure, of the
    groups that teach (with a KL, of all that count), and NaN in a step without an update."""
    selected_fraction: float
    """Share of sampled tokens that the entropy mask selected: they carried gradient."""
    ratio_mean: float
    """Mean importance ratio of the policy against the one at the step's start."""
    clip_fraction: float
    """Share of tokens whose ratio was clipped."""
    importance_mean: float
    """Mean weight pi_old / mu of the objective's tokens before loss.importance_cap, about 1 if actor and learner have
    the same policy. `gspo`, and loss.importance by sequence: of its samples."""
    importance_capped: float
    """Share of those weights above the cap, for masks also of those below the floor. NaN if the cap is 0."""
    importance_ess: float
    """Their effective sample size as a share of their number, (sum c)^2 / (n sum c^2): 1 where all are equal."""
    stale_fraction: float
    """Share of the objective's tokens that loss.stale_limit left out. NaN where there is none."""
    mismatch_mean: float
    """Mean |actor - learner| log-prob."""
    mismatch_p95: float
    """Its 95th percentile."""
    mismatch_p99: float
    """Its 99th percentile: the mismatch gate judges it."""
    mismatch_max: float
    """Its maximum."""
    loss: float
    """Loss of the last pass, all terms together, the mean of its updates. With one update the objective's share of it
    is about 0, however much the policy learns."""
    kl: float
    """Mean k3 estimate against the reference of loss.kl_beta, over all tokens of the groups that count, in the
    first pass. NaN if loss.kl_beta = 0."""
    grad_norm: float
    """Global norm before it was scaled down."""
    lr: float
    """Learning rate of the step."""
    length_mean: float
    """Mean number of sampled tokens in a completion."""
    turns_mean: float
    """Mean number of the model's turns in a completion; 1 without an environment."""
    truncated: float
    """Share of completions that reached the cap."""
    tokens_per_s: float
    """Sampled tokens over the step's wall time."""
    rollout_s: float
    """Actors' time decoding."""
    verify_s: float
    """Actors' time scoring."""
    swap_s: float
    """Time of all processes in which they installed adapters, and moved the base between card and host memory."""
    update_s: float
    """Learner's time in passes and optimizer."""
    idle_s: float
    """The step's time in which nobody decoded, scored, swapped or updated."""
    step_s: float
    """Wall time of the step."""
    actor_mb: float
    """Peak resident memory of the largest actor."""
    learner_mb: float
    """Peak resident memory of the learner."""
    card_mb: dict[str, float]
    """Memory of the cards in MiB: `<process>_allocated` and `_reserved`, the peaks of the learner and of the largest
    actor, and `_driver`, what all processes use of its card. Rows have `mem/<name>` for those; none on a CPU."""
    weight_sum: float
    """Sum of the loss weights of the step's tokens."""
    penalised_fraction: float
    """Share of sampled tokens that the constraint penalised. NaN if none is configured, like the next two."""
    penalised_kl: float
    """Mean k3 estimate of those tokens against their reference, in the last pass."""
    constraint_loss: float
    """The constraint's part of the loss in the last pass."""
    noise_signal: float
    """Estimate of the squared norm of the true gradient; may be negative. NaN if it is not measured, like the next."""
    noise_spread: float
    """Estimate of the variance of one group's gradient; over noise_signal it is the gradient noise scale, in groups."""
    ewc_penalty: float
    """The part of elastic weight consolidation in the loss of the last pass. NaN if curriculum.ewc = 0."""
    teacher_kl: float
    """Mean log pi - log pi_T of the step's tokens, as sampled: an estimate of KL(policy || teacher) per token. NaN
    without a teacher."""
    policy_version: int
    """Version the step was sampled from."""
    curriculum_stage: int
    """Stage of the next step's tasks, from 0."""
    curriculum_pass_rate: float
    """Share of right completions among those of the step that count."""
    curriculum_effective_tasks: float
    """Effective number of tasks that the curriculum chooses among: 1 / sum q_i^2."""
    evaluated: dict[str, float] = msgspec.field(default_factory=dict[str, float])
    """The evaluation that came since the row before, if one did: `step`, the version of its policy; `greedy`,
    `sampled`, with several draws `pass_at_<k>` and `maj_at_<k>` for the largest k; of what was sampled `reward_mean`
    and `reward_<name>`, unless the reward is 1 if correct, else 0; `wall_s`. Rows have `eval/<name>` for those."""
    actors: dict[str, float] = msgspec.field(default_factory=dict[str, float])
    """Of several actors (shared/run/summary.py says what each figure is): `<id>/tokens_per_s`, `<id>/waiting`,
    `<id>/faults`, `<id>/version`. Rows have `actors/<name>` for those."""
    limited: dict[str, float] = msgspec.field(default_factory=dict[str, float])
    """The key of the configuration that costs several actors the most time, and the share of their time. Rows have
    `limited/<key>` for it, and none if it is little."""
    energy: dict[str, float] = msgspec.field(default_factory=dict[str, float])
    """Joules that the hardware counted in the step, of this machine: `card`, `cpu`. Rows have `energy/<name>_j` for
    those that can be read."""

    def to_row(self) -> dict[str, Any]:
        row: dict[str, Any] = {}
        for key, value in msgspec.to_builtins(self).items():
            if key in NAMED:
                row |= {NAMED[key].format(name): finite(figure) for name, figure in value.items()}
            elif key == "outcomes":
                row |= {f"outcome/{outcome}": finite(value.get(outcome, 0.0)) for outcome in Outcome}
            else:
                row[key] = finite(value)
        return row


def finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


class MetricsLog:
    """Writes StepMetrics as rows of a LineLog."""

    def __init__(self, lines: LineLog) -> None:
        self._lines = lines

    def log(self, metrics: StepMetrics) -> dict[str, Any]:
        row = metrics.to_row()
        self._lines.append(row)
        return row

    def sync(self) -> None:
        self._lines.sync()

    def resume_at(self, step: int) -> None:
        self._lines.truncate_from(step)


@dataclass(frozen=True, kw_only=True)
class Thinned:
    """A curve in few points; each stands for neighbouring steps. None: not measured in any of them."""

    step: list[int]
    """The last of its steps."""
    mean: list[float | None]
    """Of its steps."""
    low: list[float | None]
    """The smallest."""
    high: list[float | None]
    """The largest."""


@dataclass(frozen=True, kw_only=True)
class Curves:
    """Several curves with the same steps, which are those of Thinned. NaN: not measured in any of a point's steps."""

    step: list[int]
    mean: np.ndarray
    """[curves, points] float64, like the next two."""
    low: np.ndarray
    high: np.ndarray


class MetricsTable:
    """The metrics of one run. Each call looks at the file again first."""

    def __init__(self, path: Path) -> None:
        self.file = GrowingFile(path)
        self.columns: dict[str, array[float]] = {}
        self.known = 0
        """Rows until now."""
        self.damaged = 0
        """Lines that were skipped."""
        self.generation = 0
        """Changes when rows were dropped."""

    def look(self) -> None:
        """Add the rows that were written since the last look."""
        lines = self.file.new_lines(BLOCK)
        if self.file.generation != self.generation:
            self.generation = self.file.generation
            self.columns, self.known, self.damaged = {}, 0, 0
        while lines:
            self.add(lines)
            lines = self.file.new_lines(BLOCK)

    def add(self, lines: Sequence[str]) -> None:
        rows = [row for line in lines if (row := parsed(line)) is not None]
        self.damaged += len(lines) - len(rows)
        for key in dict.fromkeys(chain.from_iterable(rows)):
            if key not in self.columns:
                self.columns[key] = array("d", [math.nan] * self.known)
        for key, column in self.columns.items():
            column.extend([math.nan if (found := row.get(key)) is None else found for row in rows])
        self.known += len(rows)

    def __len__(self) -> int:
        self.look()
        return self.known

    def keys(self) -> list[str]:
        self.look()
        return list(self.columns)

    def column(self, key: str) -> np.ndarray:
        """[steps] float64, a copy; NaN where it was not measured, or for a key that no row has."""
        self.look()
        return self.known_column(key)

    def whole(self) -> dict[str, np.ndarray]:
        """All columns, of the same steps."""
        self.look()
        return {key: self.known_column(key) for key in self.columns}

    def known_column(self, key: str) -> np.ndarray:
        """Without another look."""
        return np.array(self.columns.get(key, ()) or [math.nan] * self.known, dtype=np.float64)

    def row(self, place: int) -> Row:
        """By place, -1 for the last; null is None."""
        self.look()
        return self.known_row(place)

    def rows(self) -> list[Row]:
        self.look()
        return [self.known_row(place) for place in range(self.known)]

    def known_row(self, place: int) -> Row:
        return {key: None if math.isnan(column[place]) else column[place] for key, column in self.columns.items()}

    def curves(self, keys: Sequence[str], points: int, first: int = 0, last: int | None = None) -> Curves:
        """For charts that are so many points wide, of the steps `first` to `last`."""
        self.look()
        steps = self.known_column("step")
        inside = (steps >= first) & (steps <= (np.inf if last is None else last))
        values = np.array([self.known_column(key)[inside] for key in keys]).reshape(len(keys), int(inside.sum()))
        return thin(steps[inside], values, points)

    def thinned(self, keys: Sequence[str], points: int, first: int = 0, last: int | None = None) -> dict[str, Thinned]:
        """The same curves, by key."""
        found = self.curves(keys, points, first, last)
        rows = zip(*map(with_gaps, (found.mean, found.low, found.high)), strict=True)
        curves = (Thinned(step=found.step, mean=mean, low=low, high=high) for mean, low, high in rows)
        return dict(zip(keys, curves, strict=True))


def thin(steps: np.ndarray, values: np.ndarray, points: int) -> Curves:
    """values: [curves, steps]. At most so many points, each of about as many steps as the others."""
    starts = np.unique(np.linspace(0, len(steps), min(max(points, 1), len(steps)) + 1).astype(int))[:-1]
    if len(starts) == len(steps):
        return Curves(step=steps.astype(int).tolist(), mean=values, low=values, high=values)
    counts = np.add.reduceat((~np.isnan(values)).astype(np.int64), starts, axis=1)
    sums = np.add.reduceat(np.nan_to_num(values, nan=0.0), starts, axis=1)
    return Curves(
        step=steps[np.append(starts[1:], len(steps)) - 1].astype(int).tolist(),
        mean=np.where(counts > 0, sums / np.maximum(counts, 1), np.nan),
        low=np.fmin.reduceat(values, starts, axis=1),
        high=np.fmax.reduceat(values, starts, axis=1),
    )


def with_gaps(values: np.ndarray) -> list[list[float | None]]:
    """None for NaN."""
    found = values.astype(object)
    found[np.isnan(values)] = None
    return found.tolist()


def parsed(line: str) -> Row | None:
    """None if the line cannot be read."""
    try:
        return msgspec.json.decode(line, type=dict[str, float | None])
    except (ValueError, RecursionError):
        return None
