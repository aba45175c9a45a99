"""`verify`: scores a file of completions with a built-in verifier, in the same killable workers as a run.

    in     {"id": ..., "completion": "...", "answer": "..."}        a line each; further keys are not looked at
    out    {"id": ..., "outcome": "correct", "reward": 1.0, "extracted": "18"}        in the same order

Nothing is written unless every line can be read. The answer may be a number.
"""

import contextlib
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from actor.score_pool import ScorePool
from actor.verdict import ScoreJob, Verdict
from shared.config import VerifierConfig, VerifierKind
from shared.errors import DataError
from shared.files import write_whole


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the input."""

    id: str | int
    """Comes back as it is."""
    completion: str
    """What the model said."""
    answer: str | int | float
    """The gold answer."""


def run_command(*, kind: VerifierKind, strict: bool, source: Path, out: Path, workers: int) -> int:
    """Read, score, write."""
    rows = read_rows(source)
    verifier = VerifierConfig(kind=kind, strict=strict, workers=workers)
    with contextlib.closing(ScorePool(verifier)) as pool:
        verdicts = pool.score([job(row) for row in rows], lambda: None)
    lines = [json.dumps(result(row, verdict)) + "\n" for row, verdict in zip(rows, verdicts, strict=True)]
    write_whole(out, "".join(lines).encode())
    counts = Counter(str(verdict.outcome) for verdict in verdicts)
    print(f"{len(rows)} completions in {out}:", *(f"{name} {n}" for name, n in counts.most_common()), file=sys.stderr)
    return 0


def read_rows(source: Path) -> list[Row]:
    """Every line that is not blank."""
    if not source.is_file():
        raise DataError(f"--in names {source}, which is no file; give JSON lines with id, completion and answer.")
    lines = enumerate(source.read_bytes().split(b"\n"), start=1)
    return [read_row(line, f"{source}, line {number}") for number, line in lines if line.strip()]


def read_row(line: bytes, where: str) -> Row:
    """One line, or what is wrong with it."""
    try:
        return msgspec.json.decode(line, type=Row)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        words = str(error).replace("`", "'").rstrip(".")
        raise DataError(f"{where}: {words}; expected an object with id, completion and answer.") from error


def job(row: Row) -> ScoreJob:
    """What the pool scores. The end is the file's, so nothing counts as truncated."""
    answer = row.answer if isinstance(row.answer, str) else str(row.answer)
    return ScoreJob(
        prompt="", completion=row.completion, completion_ids=[], truncated=False, columns={"answer": answer}
    )


def result(row: Row, verdict: Verdict) -> dict[str, Any]:
    """One line of the output."""
    return {"id": row.id, "outcome": verdict.outcome, "reward": verdict.score, "extracted": verdict.extracted}
