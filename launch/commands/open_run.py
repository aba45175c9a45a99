"""What most commands do first: open a run, read its configuration, and pin the threads and vector units of
arithmetic.

The pinning must come before torch is imported: MKL and OpenMP read their environment once, when they are loaded.
"""

import os
from pathlib import Path
from typing import Literal

from shared.config.load import config_from_json
from shared.config.processes import ComputeConfig
from shared.config.tree import Config
from shared.process.determinism import cpu_environment
from shared.process.processor import settled_config
from shared.run.run_dir import RunDir

Role = Literal["learner", "actor"]
"""Whose arithmetic a command repeats. On a CPU the thread count is part of the last bit."""


def open_run(directory: Path, compute_as: Role | None = None) -> tuple[RunDir, Config]:
    """compute_as: None for a command that computes nothing. A run that has not started yet computes as it would if it
    started here, and nothing of that is kept."""
    run = RunDir.open(directory)
    config = settled_config(config_from_json(run.config.read_bytes()))
    if compute_as:
        pin_cpu(config.compute, compute_as)
    return run, config


def pin_cpu(compute: ComputeConfig, role: Role) -> None:
    threads = compute.learner_threads if role == "learner" else compute.actor_threads
    os.environ.update(cpu_environment(threads, compute.blas))
