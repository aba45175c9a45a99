"""Checks before training that the disk has room for all that a run will write.

    checkpoints   (keep + best + one being written + one being removed) * (adapter + two moments + older versions);
                  with eval.beside also those that may wait for their evaluation
    journal       steps left * completions * (cap * 13 bytes + their prompts and frames), or what journal.keep leaves
    rollouts      the smaller of all steps * log.rollouts_kb and steps left * completions * cap * 60 bytes
    the rest      metrics, evaluations, logs: a few KB per step, and a constant

All completions are counted as long as the cap allows, so this is an upper bound. Files that are in the folder already
are not counted again. Left out on purpose: other programs that fill the same disk. A run that meets a full disk stops
and can be resumed.
"""

import shutil
from pathlib import Path

from shared.config.load import SAMPLE_BYTES, TEACHER_BYTES, TOKEN_BYTES
from shared.config.processes import CheckpointConfig, EvalConfig, JournalConfig, LogConfig
from shared.config.tree import Config, RolloutConfig
from shared.errors import RunDirError
from shared.run.run_dir import RunDir

ROLLOUT_TOKEN_BYTES = 60
"""Text, piece, id, log-prob, gap, entropy and mask as JSON."""
STEP_BYTES = 4096
"""A row of metrics and lines of logs."""
FLOOR_BYTES = 4 * 2**20
"""Manifests, evaluations and other small files."""


def bytes_needed(config: Config, adapter_bytes: int, first_step: int, anchor_bytes: int = 0) -> int:
    """The most that the rest of a run can have on disk at a time. anchor_bytes: of the anchor in a checkpoint."""
    steps, rollout, max_lag = config.run.steps - first_step, config.rollout, config.pipeline.max_lag
    token_bytes = TOKEN_BYTES + (TEACHER_BYTES if config.teacher.url else 0)
    group = group_bytes(rollout, config.tasks.max_prompt_tokens, token_bytes)
    groups = config.most_prompts * (1 + rollout.replacement_rounds)
    step = groups * group
    checkpoints = config.checkpoint.keep + 3 + waiting(config.eval, steps)
    return (
        checkpoints * (checkpoint_bytes(adapter_bytes, max_lag) + anchor_bytes)
        + journal_steps(config.journal, config.checkpoint, max_lag, steps) * step
        + min(config.run.steps * config.log.rollouts_bytes, steps * rollout_bytes(rollout, config.log, groups))
        + steps * STEP_BYTES
        + FLOOR_BYTES
    )


def waiting(evaluation: EvalConfig, steps: int) -> int:
    """Checkpoints that may wait for their evaluation at once."""
    return steps // evaluation.every if evaluation.beside else 0


def checkpoint_bytes(adapter_bytes: int, max_lag: int) -> int:
    """Adapter and two moments of its size; with a lag also the versions that pending orders name."""
    return (3 + max_lag) * adapter_bytes


def journal_steps(journal: JournalConfig, checkpoint: CheckpointConfig, max_lag: int, steps: int) -> int:
    """Steps that the journal keeps at a time."""
    if journal.keep == "all":
        return steps
    return min(steps, (checkpoint.keep + 1) * checkpoint.every + max_lag)


def group_bytes(rollout: RolloutConfig, max_prompt_tokens: int, token_bytes: int) -> int:
    """A group in the journal, its prompt and completions as long as possible."""
    completion = rollout.max_new_tokens * token_bytes + SAMPLE_BYTES
    return rollout.group * completion + max_prompt_tokens * 4 + SAMPLE_BYTES


def rollout_bytes(rollout: RolloutConfig, log: LogConfig, groups: int) -> int:
    """What a step may write if the log has room for it. groups: in a step."""
    logged = min(groups, log.rollouts_per_step)
    return logged * rollout.group * rollout.max_new_tokens * ROLLOUT_TOKEN_BYTES


def refuse_if_short(run: RunDir, needed: int) -> None:
    """The run's present checkpoints count as free, since most of them will be replaced."""
    free = shutil.disk_usage(run.path).free
    present = folder_bytes(run.checkpoints)
    if free + present < needed:
        raise RunDirError(
            f"The rest of this run may need {megabytes(needed - present)} and {run.path} has {megabytes(free)} free;"
            " make room on that disk, or begin a run with a smaller checkpoint.keep, fewer run.steps, or journal.keep ="
            ' "checkpoints".'
        )


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def megabytes(count: int) -> str:
    """`12.3 MiB`"""
    return f"{count / 2**20:.1f} MiB"
