"""Whether the disk has room for what a run will write: asked before it trains, not in the middle of a checkpoint.

    checkpoints   (keep + best + one being written + one being removed) * (adapter + two moments + older versions)
    journal       steps left * samples * (cap * 12 bytes + their prompts and frames), or what journal.keep leaves of it
    rollouts      steps left * logged samples * cap * 24 bytes
    the rest      metrics, evaluations, logs: a few KB a step, and a floor

All caps are taken as reached, so this is a bound and not a guess; what lies in the folder already counts as spent.
Left out on purpose: other programs that fill the same disk; a run that meets a full disk stops and can be resumed.
"""

import shutil
from pathlib import Path

from shared.config.tree import Config
from shared.errors import RunDirError
from shared.run.run_dir import RunDir

TOKEN_BYTES = 12
"""Id, log-prob and entropy."""
SAMPLE_BYTES = 64
"""Length, outcome, score and framing."""
ROLLOUT_TOKEN_BYTES = 24
"""Text, id, entropy and mask as JSON."""
STEP_BYTES = 4096
"""A row of metrics and lines of logs."""
FLOOR_BYTES = 4 * 2**20
"""Manifests, evaluations, whatever is small."""


def bytes_needed(config: Config, adapter_bytes: int, first_step: int, anchor_bytes: int = 0) -> int:
    """What the rest of a run may write at most, and hold at one time. anchor_bytes: of the anchor in a checkpoint."""
    steps = config.run.steps - first_step
    return (
        (config.checkpoint.keep + 3) * (checkpoint_bytes(config, adapter_bytes) + anchor_bytes)
        + journal_steps(config, steps) * journal_bytes(config)
        + steps * (rollout_bytes(config) + STEP_BYTES)
        + FLOOR_BYTES
    )


def checkpoint_bytes(config: Config, adapter_bytes: int) -> int:
    """Adapter and two moments of its size; with a lag also the versions that pending orders name."""
    return (3 + config.pipeline.max_lag) * adapter_bytes


def journal_steps(config: Config, steps: int) -> int:
    """Steps whose answers are there at one time."""
    if config.journal.keep == "all":
        return steps
    return min(steps, (config.checkpoint.keep + 1) * config.checkpoint.every + config.pipeline.max_lag)


def journal_bytes(config: Config) -> int:
    """A step's answers, all of them as long as may be."""
    rollout = config.rollout
    sample = rollout.max_new_tokens * TOKEN_BYTES + SAMPLE_BYTES
    group = rollout.group * sample + config.tasks.max_prompt_tokens * 4 + SAMPLE_BYTES
    return config.most_prompts * (1 + rollout.replacement_rounds) * group


def rollout_bytes(config: Config) -> int:
    """A step's rows of rollouts.jsonl."""
    return config.log.rollouts_per_step * config.rollout.group * config.rollout.max_new_tokens * ROLLOUT_TOKEN_BYTES


def refuse_if_short(run: RunDir, needed: int) -> None:
    """Count what the run holds already, since most of it will be replaced, and compare."""
    free = shutil.disk_usage(run.path).free
    held = folder_bytes(run.checkpoints)
    if free + held < needed:
        raise RunDirError(
            f"The rest of this run may need {megabytes(needed - held)} and {run.path} has {megabytes(free)} free; make"
            " room on that disk, or begin a run with a smaller checkpoint.keep, fewer run.steps, or journal.keep ="
            ' "checkpoints".'
        )


def folder_bytes(folder: Path) -> int:
    """Of all files below it."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def megabytes(count: int) -> str:
    """`12.3 MiB`"""
    return f"{count / 2**20:.1f} MiB"
