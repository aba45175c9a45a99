"""Whether the user's reward function can be imported, tried in a process of its own."""

from dataclasses import dataclass

from launch.doctor.probe import ask
from shared.config import VerifierConfig

PROBE = "launch.doctor.probes.reward_probe"


@dataclass(frozen=True, kw_only=True)
class Reward:
    """What came of it."""

    function: str
    """`path/to/file.py:name`; empty if a built-in verifier is configured."""
    trouble: str
    """Why it cannot be used; empty if it can."""


def look_at_reward(verifier: VerifierConfig, limit_s: float) -> Reward:
    """Imports the file as a scoring worker does."""
    if verifier.kind != "callable":
        return Reward(function="", trouble="")
    return Reward(function=verifier.function, trouble=ask(PROBE, [verifier.function], limit_s).trouble)
