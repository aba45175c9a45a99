"""The names of further rewards: `think_tags` is itself, `path/to/file.py:brevity` is `brevity`."""

import math
from collections.abc import Mapping

from shared.errors import ConfigError

FORMS = ("think_tags", "answer_tags")
TAKEN = ("mean", "std", "min", "max", "outcome", "length", "truncated")
"""Rows of metrics.jsonl have these names already."""


def name_of(spec: str) -> str:
    """What it is called in logs and on the wire."""
    return spec.rpartition(":")[2]


def is_function(spec: str) -> bool:
    """Whether it names a function of the user's."""
    return ":" in spec


def weights(rewards: Mapping[str, float]) -> dict[str, float]:
    """Weight by name."""
    return {name_of(spec): weight for spec, weight in rewards.items()}


def check_rewards(rewards: Mapping[str, float]) -> None:
    """ConfigError unless each is known by one name of its own."""
    for spec, weight in rewards.items():
        if not math.isfinite(weight):
            raise ConfigError(f"verifier.rewards gives '{spec}' the weight {weight}; expected a finite number.")
        if not is_function(spec) and spec not in FORMS:
            raise ConfigError(
                f"verifier.rewards names '{spec}', expected {', '.join(FORMS)} or a function as path/to/file.py:name."
            )
        if not name_of(spec).isidentifier() or name_of(spec) in TAKEN:
            raise ConfigError(
                f"verifier.rewards names '{spec}', which cannot be called '{name_of(spec)}' in the logs; give the"
                " function another name."
            )
    if len(weights(rewards)) < len(rewards):
        raise ConfigError("verifier.rewards names two functions alike; the logs could not tell them apart, rename one.")
