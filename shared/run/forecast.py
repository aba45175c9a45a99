"""What a run was predicted to need (plan.json), what was measured, and time and energy per point of reward.

The launcher writes the prediction before the processes start (launch/plan). The learner puts it into summary.json next
to what its rows of metrics say, so that both can be compared after every run. A run on Ray, one whose learner was
started by hand, and one whose model was not on this machine have no prediction.
"""

import math
import statistics
from collections.abc import Mapping
from typing import Literal

import msgspec
import numpy as np

from shared.run.files import write_whole
from shared.run.metrics import MetricsTable
from shared.run.run_dir import RunDir


class Figures(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Memory and time of a run. None: not predicted, or not measured."""

    learner_mb: float | None = None
    """Peak resident memory of the learner, shared pages included (`mem/learner_mb`)."""
    actor_mb: float | None = None
    """The same of the largest actor (`mem/actor_mb`)."""
    all_mb: float | None = None
    """Peak of all processes together, shared pages counted once. Nothing in a run measures it."""
    learner_allocated_mb: float | None = None
    """Peak of the learner's tensors on a card (`mem/learner_allocated`)."""
    learner_reserved_mb: float | None = None
    """With what PyTorch has cached (`mem/learner_reserved`)."""
    learner_driver_mb: float | None = None
    """Everything on the card at the end of the learner's turn, both processes with their contexts
    (`mem/learner_driver`)."""
    actor_allocated_mb: float | None = None
    """The same of the actor (`mem/actor_allocated`)."""
    actor_reserved_mb: float | None = None
    actor_driver_mb: float | None = None
    rollout_s: float | None = None
    """Decoding in a step, the median of all steps (`time/rollout_s`)."""
    update_s: float | None = None
    """The learner's part, the median (`time/update_s`)."""
    step_s: float | None = None
    """A whole step, the median (`time/step_s`)."""
    completion_tokens: float | None = None
    """Mean tokens of a completion: assumed, or the mean of all steps (`length/mean`)."""


MEASURED = {
    "learner_mb": ("mem/learner_mb", max),
    "actor_mb": ("mem/actor_mb", max),
    **{
        f"{process}_{kind}_mb": (f"mem/{process}_{kind}", max)
        for process in ("learner", "actor")
        for kind in ("allocated", "reserved", "driver")
    },
    "rollout_s": ("time/rollout_s", statistics.median),
    "update_s": ("time/update_s", statistics.median),
    "step_s": ("time/step_s", statistics.median),
    "completion_tokens": ("length/mean", statistics.fmean),
}


def measured(run: RunDir) -> Figures | None:
    """From the rows of metrics.jsonl; None if there are none. A row that cannot be read does not count."""
    table, found = MetricsTable(run.metrics), dict[str, float]()
    for name, (key, summed) in MEASURED.items():
        values = [value for value in table.column(key).tolist() if not math.isnan(value)]
        if values:
            found[name] = round(summed(values), 3)
    return Figures(**found) if found else None


AN_END = 5
"""Steps at the beginning and at the end of a run whose rewards are compared."""
PARTS = ("rollout", "verify", "swap", "update", "idle", "step")
SOURCES = ("card", "cpu")


class Spent(msgspec.Struct, frozen=True, kw_only=True):
    """Where time and energy of a run's steps went, in all and for each point of reward.

    A point is a hundredth of mean reward: points = 100 * (mean of the last five steps - mean of the first five). There
    are none with fewer than ten steps, without rewards (a warm start), and where the difference is not positive.
    Evaluations, checkpoints and whatever else is between steps do not count.
    """

    points: float | None = None
    """Gained; None if there are none."""
    seconds: dict[str, float] = {}
    """Of all steps: `step`, and in it `rollout`, `verify`, `swap`, `update` and `idle`, as in the metrics. Where
    processes work at the same time they are more than `step` together."""
    seconds_per_point: dict[str, float] = {}
    """The same by the points; empty without any."""
    joules: dict[str, float] = {}
    """Of all steps, by source: `card`, `cpu` of this machine, as counted by the hardware."""
    joules_per_point: dict[str, float] = {}
    unread: dict[str, str] = {}
    """Sources without a figure, and one word why: `absent`, `forbidden`, `unsupported`, `unreadable`, or `partly` if
    there are steps in which it was not counted."""


def spent(metrics: MetricsTable, unread: Mapping[str, str]) -> Spent:
    """unread: what the learner could not read, and why."""
    # The only look at the file, so all columns have the same steps.
    known_keys = set(metrics.keys())
    points = points_gained(metrics.known_column("reward/mean"))
    sums = {part: total(metrics.known_column(f"time/{part}_s")) for part in PARTS}
    used = {source: total(metrics.known_column(f"energy/{source}_j")) for source in SOURCES}
    partly = {source: "partly" for source in SOURCES if f"energy/{source}_j" in known_keys and used[source] is None}
    seconds, joules = known(sums), known(used)
    return Spent(
        points=points,
        seconds=seconds,
        seconds_per_point=by_points(seconds, points),
        joules=joules,
        joules_per_point=by_points(joules, points),
        unread={source: why for source, why in (dict(unread) | partly).items() if source not in joules},
    )


def points_gained(rewards: np.ndarray) -> float | None:
    """As `Spent` says. rewards: [steps]"""
    if len(rewards) < 2 * AN_END:
        return None
    gained = 100.0 * float(rewards[-AN_END:].mean() - rewards[:AN_END].mean())
    return gained if gained > 0 else None


def total(values: np.ndarray) -> float | None:
    """None if a step has no figure: the sum of the others would look like that of all."""
    return float(values.sum()) if len(values) and np.isfinite(values).all() else None


def known(sums: Mapping[str, float | None]) -> dict[str, float]:
    return {name: round(amount, 3) for name, amount in sums.items() if amount is not None}


def by_points(amounts: Mapping[str, float], points: float | None) -> dict[str, float]:
    return {name: round(amount / points, 6) for name, amount in amounts.items()} if points else {}


def write_prediction(run: RunDir, predicted: Figures) -> None:
    write_whole(run.plan, msgspec.json.format(msgspec.json.encode(predicted), indent=2), durable=False)


def read_prediction(run: RunDir) -> Figures | None:
    """None if there is none, or if it is damaged: nothing depends on it."""
    try:
        return msgspec.json.decode(run.plan.read_bytes(), type=Figures)
    except (OSError, ValueError, RecursionError):
        return None


def planned_on_card(run: RunDir, process: Literal["learner", "actor"]) -> int:
    """Bytes that PyTorch reserves there at its peak; 0 without a prediction."""
    predicted = read_prediction(run) or Figures()
    found = predicted.learner_reserved_mb if process == "learner" else predicted.actor_reserved_mb
    return round((found or 0.0) * 2**20)
