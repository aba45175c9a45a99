"""plan.json: what a run was predicted to take, and the same figures as they were measured.

The launcher writes the prediction before the processes start (launch/plan). The learner puts it into summary.json next
to what its rows of metrics say, so that both can be compared after every run. A run that was prepared for other
machines, or whose model was not on this one, has no prediction.
"""

import math
import statistics
from typing import Literal

import msgspec

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
