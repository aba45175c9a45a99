"""summary.json: how a run stands or ended. Written by the learner, read by the commands, both as this record.

Keys beyond these belong to other readers and are passed over.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from shared.errors import DamageError
from shared.run.evaluation import Evaluation
from shared.run.files import write_whole
from shared.run.run_dir import RunDir

Status = Literal["running", "done", "stopped", "failed"]


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """How a run stands or ended."""

    status: Status
    """`running` also where it was ended without a word."""
    steps: int
    """Optimizer steps done."""
    wall_s: float
    """Time the run took, restarts included."""
    adapter_sha256: str
    """Digest of the newest adapter."""
    eval: Mapping[str, Evaluation] = {}
    """`base` and `final`, those that were made, without the single answers."""


def write_summary(run: RunDir, summary: Summary) -> None:
    """summary.json, whole."""
    short = {label: msgspec.structs.replace(report, answers=()) for label, report in summary.eval.items()}
    whole = msgspec.structs.replace(summary, eval=short)
    write_whole(run.summary, msgspec.json.format(msgspec.json.encode(whole), indent=2))


def read_summary(run: RunDir) -> Summary | None:
    """None while there is none: the run was ended before its first word."""
    return read_file(run.summary)


def read_file(path: Path) -> Summary | None:
    """The file as this record, if there is one."""
    if not path.is_file():
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=Summary)
    except (ValueError, RecursionError) as error:
        raise DamageError(f"{path} cannot be read ({error}); move it away, `resume` writes it again.") from error
