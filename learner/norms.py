"""Which gradients may be used, judged by those before.

    refused: loss or norm not finite;  norm > L (absolute);  norm > F x median of the last W norms, once there are 8

The norms are those before clipping, of updates that were applied. They decide what is trained on, so they are part of a
checkpoint: a resumed or replayed run judges every step as the undisturbed one did.
"""

import math
from collections import deque
from statistics import median
from typing import Any

from learner.fault import Refusal
from shared.config.tree import GuardConfig

FEWEST = 8
"""Norms before their median says anything."""


class Norms:
    """The gradient norms of the last updates."""

    def __init__(self, config: GuardConfig) -> None:
        self.config = config
        self.recent: deque[float] = deque(maxlen=config.spike_window)
        self.skips = 0
        """Steps in a row until now whose batch was set aside."""

    def refusal(self, loss: float, norm: float) -> Refusal | None:
        """Why this gradient is not to be used, if so."""
        if not math.isfinite(loss) or not math.isfinite(norm):
            return Refusal(kind="not finite", what=f"loss {loss:.4g} and gradient norm {norm:.4g} are not both finite")
        limit, relative = self.config.grad_norm_limit, self.relative_limit()
        if limit and norm > limit:
            what = f"the gradient norm is {norm:.4g} and guard.grad_norm_limit is {limit:g}"
            return Refusal(kind="spike", what=what)
        if relative and norm > relative:
            what = (
                f"the gradient norm is {norm:.4g}, more than guard.spike_factor = {self.config.spike_factor:g} times"
                f" the median of the last {len(self.recent)} ({median(self.recent):.4g})"
            )
            return Refusal(kind="spike", what=what)
        return None

    def relative_limit(self) -> float:
        """The bound by the steps before; 0 for none."""
        enough = len(self.recent) >= min(FEWEST, self.config.spike_window)
        return self.config.spike_factor * median(self.recent) if enough else 0.0

    def applied(self, norm: float) -> None:
        """This one was used."""
        self.recent.append(norm)

    def state_dict(self) -> dict[str, Any]:
        """As JSON values; a float's shortest form gives the same float back."""
        return {"recent": list(self.recent), "skips": self.skips}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.recent = deque(state["recent"], maxlen=self.config.spike_window)
        self.skips = int(state["skips"])
