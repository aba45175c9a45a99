"""summary.json: the state or the result of a run. The learner writes it and the commands read it, both as this record.

Unknown keys are ignored.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from shared.errors import DamageError
from shared.run.evaluation import Evaluation
from shared.run.files import write_whole
from shared.run.forecast import Figures
from shared.run.run_dir import RunDir

Status = Literal["running", "done", "stopped", "failed"]


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The state or the result of a run."""

    status: Status
    """`running` also if the run was killed."""
    steps: int
    """Optimizer steps done."""
    wall_s: float
    """Time the run took, restarts included."""
    adapter_sha256: str
    """sha256 of the newest adapter."""
    predicted: Figures | None = None
    """Memory and time, before the run began; None if nothing was predicted."""
    measured: Figures | None = None
    """The same as it was measured until now; None before the first step."""
    eval: Mapping[str, Evaluation] = {}
    """`base` and `final` if they exist, without the results of single tasks."""


def write_summary(run: RunDir, summary: Summary) -> None:
    short = {label: msgspec.structs.replace(report, task_results=()) for label, report in summary.eval.items()}
    whole = msgspec.structs.replace(summary, eval=short)
    write_whole(run.summary, msgspec.json.format(msgspec.json.encode(whole), indent=2))


def read_summary(run: RunDir) -> Summary | None:
    """None if the run ended before it wrote one."""
    return read_file(run.summary)


def read_file(path: Path) -> Summary | None:
    if not path.is_file():
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=Summary)
    except (ValueError, RecursionError) as error:
        raise DamageError(f"{path} cannot be read ({error}); move it away, `resume` writes it again.") from error
