"""`verify`: score a file of completions with a built-in verifier, in the same killable workers as a run.

    in     {"id": ..., "completion": "...", "answer": "..."}        one a line; other keys are ignored
    out    {"id": ..., "outcome": "correct", "score": 1.0, "final_answer": "18"}        one a line, in the same order

`answer` is the gold answer, a text or a number. A line that cannot be read gives a row with the outcome `unparsable`,
the number of the line as its id, and the reason as `note`. The number of such lines is printed at the end.
"""

import codecs
import contextlib
import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from actor.scoring.pool import ScorePool
from actor.verifiers.verdict import ScoreJob, Verdict
from protocol.outcome import Outcome
from shared.config.data import MAX_WORKERS, VerifierConfig, VerifierKind
from shared.errors import ConfigError, DataError
from shared.gold_answer import plain_number
from shared.run.files import write_whole
from shared.run.run_dir import refuse_to_replace


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the input."""

    id: str | int
    """Copied to the output."""
    completion: str
    """What the model wrote."""
    answer: str | int | float
    """The gold answer."""


def verify_file(*, kind: VerifierKind, strict: bool, source: Path, out: Path, workers: int) -> int:
    if workers > MAX_WORKERS:
        raise ConfigError(f"--workers got {workers}; expected at most {MAX_WORKERS}.")
    refuse_to_replace(out, source)
    rows = read_rows(source)
    read = [row for row in rows if isinstance(row, Row)]
    verifier = VerifierConfig(kind=kind, strict=strict, workers=workers)
    with contextlib.closing(ScorePool(verifier)) as pool:
        verdicts = iter(pool.score([job(row) for row in read], lambda: None))
    results = [result(row, next(verdicts)) if isinstance(row, Row) else row for row in rows]
    write_whole(out, "".join(json.dumps(row) + "\n" for row in results).encode())
    counts = Counter(str(row["outcome"]) for row in results)
    print(f"{len(rows)} completions in {out}:", *(f"{name} {n}" for name, n in counts.most_common()), file=sys.stderr)
    faults = [row["note"] for row in rows if not isinstance(row, Row)]
    if faults:
        print(f"{len(faults)} of them could not be read, the first: {faults[0]}", file=sys.stderr)
    return 0


def read_rows(source: Path) -> list[Row | dict[str, Any]]:
    """Lines that are not blank: a Row to be scored, or the result of a line that cannot be read."""
    lines = enumerate(input_lines(source, "JSON lines with id, completion and answer"), start=1)
    return [read_row(line, source, number) for number, line in lines if line.strip()]


def input_lines(source: Path | None, wanted: str) -> list[bytes]:
    """The lines of the file that --in names, without the mark that some editors put before the first character.
    DataError if it is not a file. wanted: what it should have been."""
    if source is None or not os.path.isfile(source):
        raise DataError(f"--in got {source}, which is not a file; give {wanted}.")
    # Not splitlines(), which also ends a line at characters that a text may have, such as a carriage return.
    return source.read_bytes().removeprefix(codecs.BOM_UTF8).split(b"\n")


def read_row(line: bytes, source: Path, number: int) -> Row | dict[str, Any]:
    try:
        return msgspec.json.decode(line, type=Row)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        words = str(error).replace("`", "'").rstrip(".")
        note = f"{source}, line {number}: {words}; expected an object with id, completion and answer."
        return {"id": number, "outcome": Outcome.UNPARSABLE, "score": 0.0, "final_answer": None, "note": note}


def job(row: Row) -> ScoreJob:
    """The file does not say whether a completion reached a cap, so none counts as truncated."""
    answer = plain_number(row.answer) if isinstance(row.answer, float) else str(row.answer)
    columns = {"answer": answer}
    return ScoreJob(prompt="", completion=row.completion, completion_ids=[], truncated=False, columns=columns)


def result(row: Row, verdict: Verdict) -> dict[str, Any]:
    return {"id": row.id, "outcome": verdict.outcome, "score": verdict.score, "final_answer": verdict.final_answer}
