"""summary.json and eval/*.json as typed records; keys beyond these belong to other readers and are passed over."""

from pathlib import Path
from typing import TypeVar

import msgspec

from shared.errors import DamageError
from shared.run_dir import RunDir

T = TypeVar("T")


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """Right answers of one way to decode."""

    correct: int
    """How many."""
    accuracy: float
    """Their share of n."""
    low: float
    """Lower end of the 95 % Wilson interval."""
    high: float
    """Upper end."""


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One held-out question and what was answered."""

    question: str
    """The question as it stands in the data."""
    completion: str
    """The answer's text."""
    outcome: str
    """What the verifier found."""


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """One held-out evaluation: eval/base.json, eval/final.json."""

    label: str
    """`base` or `final`."""
    n: int
    """Problems."""
    greedy: Share
    """Most likely token each time."""
    sampled: Share
    """As in training."""
    samples: tuple[Sample, ...] = ()
    """A few of the problems, the same ones in every evaluation of a run."""


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """How a run stands or ended."""

    status: str
    """`running`, `done`, `stopped` or `failed`."""
    steps: int
    """Optimizer steps done."""
    wall_s: float
    """Time the run took, restarts included."""
    adapter_sha256: str
    """Digest of the newest adapter."""


def read_summary(run: RunDir) -> Summary | None:
    """None while there is none: the run was ended before its first word."""
    return read(run.summary, Summary)


def read_evaluation(run: RunDir, label: str) -> Evaluation | None:
    """None if it was not made."""
    return read(run.eval / f"{label}.json", Evaluation)


def read(path: Path, kind: type[T]) -> T | None:
    """The file as this record, if there is one."""
    if not path.is_file():
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (ValueError, RecursionError) as error:
        raise DamageError(f"{path} cannot be read ({error}); move it away, `resume` writes it again.") from error
