"""How many groups a step samples: a fixed number, or as many as the noise of the gradient asks for.

    smoothed  x <- memory x + (1 - memory) x_step           for spread and signal (learner/gradient_noise.py)
    wanted    factor * spread / signal, or max_prompts where signal <= 0
    next      the number now, or more: up to `wanted`, by at most `rate` a step, within max_prompts

It only grows: as a policy gets good its true gradient fades while the noise stays, so the scale rises over a run, and
a single quiet step should not undo that. Numbers follow from the updates alone, so a resumed or replayed run has the
same.
"""

import math
from typing import Any

from learner.gradient_noise import GradientNoise
from shared.config.tree import GrowthConfig


class BatchSize:
    """The number of groups, and what it follows from."""

    def __init__(self, prompts: int, config: GrowthConfig) -> None:
        self.prompts = prompts
        self.config = config
        self.spread = 0.0
        self.signal = 0.0

    def observe(self, noise: GradientNoise) -> None:
        """What an update found."""
        memory = self.config.memory
        self.spread = memory * self.spread + (1 - memory) * noise.spread
        self.signal = memory * self.signal + (1 - memory) * noise.signal
        within_rate = math.ceil(self.prompts * self.config.rate)
        self.prompts = max(self.prompts, min(self.wanted(), within_rate, self.config.max_prompts))

    def wanted(self) -> int:
        """By the noise alone, within the bound."""
        most = self.config.max_prompts
        asked = self.config.factor * self.spread
        return math.ceil(asked / self.signal) if asked < most * self.signal else most

    def state_dict(self) -> dict[str, Any]:
        """As JSON values; a float's shortest form gives the same float back."""
        return {"prompts": self.prompts, "spread": self.spread, "signal": self.signal}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.prompts = int(state["prompts"])
        self.spread = float(state["spread"])
        self.signal = float(state["signal"])
