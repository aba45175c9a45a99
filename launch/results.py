"""summary.json as a typed record; keys beyond these belong to other readers and are passed over."""

from pathlib import Path
from typing import TypeVar

import msgspec

from shared.errors import DamageError
from shared.run_dir import RunDir

T = TypeVar("T")


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


def read(path: Path, kind: type[T]) -> T | None:
    """The file as this record, if there is one."""
    if not path.is_file():
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (ValueError, RecursionError) as error:
        raise DamageError(f"{path} cannot be read ({error}); move it away, `resume` writes it again.") from error
