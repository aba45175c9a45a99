"""The run that all trials copy: as small as possible, but with everything that a run does."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from launch.commands.run import make_run
from launch.presets.load import load_config

CHAOS = {
    "run.steps": 5,
    "rollout.prompts": 2,
    "rollout.group": 4,
    "rollout.max_new_tokens": 16,
    "rollout.groups_per_order": 1,
    "pipeline.max_lag": 1,
    "tasks.levels": [1],
    "tasks.limit": 32,
    "checkpoint.every": 1,
    "checkpoint.keep": 2,
    "eval.problems": 0,
    "compute.learner_threads": 1,
    "compute.actor_threads": 1,
    "link.heartbeat_s": 0.2,
}
"""A lag, several orders a step and few checkpoints: older versions are saved, credits matter, pruning happens."""
NO_CHANGES: Mapping[str, object] = MappingProxyType({})


def prepare(path: Path, changes: Mapping[str, object] = NO_CHANGES) -> Path:
    """A run directory that has not begun."""
    overrides = [f"{key}={json.dumps(value)}" for key, value in {**CHAOS, **changes}.items()]
    return make_run(path, load_config("embedded", overrides)).path
