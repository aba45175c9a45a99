"""`verify`: score a file of completions with a built-in verifier or reward functions, in the same killable workers as a
run.

    in     {"id": ..., "completion": "...", "answer": "..."}        one a line; other keys are ignored
    out    {"id": ..., "outcome": "correct", "score": 1.0, "final_answer": "18"}        one a line, in the same order

`answer` is the gold answer, a text or a number. A line that cannot be read gives a row with the outcome `unparsable`,
the number of the line as its id, and the reason as `note`. A row that cannot be scored (`error`, `timeout`) has a
`note` too. How many there are of both is printed at the end.

With `--function rewards.py:name` the function gets what it would get in a run on rows like these: the other keys as
columns, `question` or `prompt` as its prompt. `answer` is then one of them and may be missing. Lines that follow each
other and differ in id and completion only are a group. `--set` takes the other keys of [verifier]; named rewards are
in the output as `rewards`.
"""

import codecs
import contextlib
import json
import os
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from actor.scoring.pool import ScorePool
from actor.verifiers.verdict import Context, ScoreJob, Verdict
from learner.tasks.sources import canonical
from protocol.outcome import Outcome
from shared.config.data import MAX_WORKERS, VerifierConfig, VerifierKind
from shared.config.load import Tree, apply_override, resolve
from shared.config.named_rewards import SUM_DECIDES, name_one, runs_functions, sum_decides
from shared.errors import ConfigError, DataError
from shared.gold_answer import plain_number
from shared.run.files import write_whole
from shared.run.run_dir import refuse_to_replace

NOT_SCORED = (Outcome.ERROR, Outcome.TIMEOUT)


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """What each line of the input has."""

    id: str | int
    """Copied to the output."""
    completion: str
    """What the model wrote."""


class Answered(Completion, frozen=True, kw_only=True):
    """A line for a built-in verifier."""

    answer: str | int | float
    """The gold answer."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A line that can be scored."""

    id: str | int
    job: ScoreJob


def verify_file(
    *, kind: VerifierKind, strict: bool, source: Path, out: Path, workers: int, overrides: Sequence[str] = ()
) -> int:
    if workers > MAX_WORKERS:
        raise ConfigError(f"--workers got {workers}; expected at most {MAX_WORKERS}.")
    verifier = verifier_of({"kind": kind, "strict": strict, "workers": workers}, overrides)
    if sum_decides(verifier):
        print(f"note: {SUM_DECIDES}; {name_one(verifier.rewards)}", file=sys.stderr)
    refuse_to_replace(out, source)
    rows = read_rows(source, runs_functions(verifier))
    read = [row for row in rows if isinstance(row, Row)]
    with contextlib.closing(ScorePool(verifier)) as pool:
        verdicts = iter(pool.score([row.job for row in read], lambda: None))
    results = [result(row.id, next(verdicts)) if isinstance(row, Row) else row for row in rows]
    write_whole(out, "".join(json.dumps(row) + "\n" for row in results).encode())
    counts = Counter(str(row["outcome"]) for row in results)
    print(f"{len(rows)} completions in {out}:", *(f"{name} {n}" for name, n in counts.most_common()), file=sys.stderr)
    say_first("read", [row["note"] for row in rows if not isinstance(row, Row)])
    say_first("scored", [row["note"] for row in results if row["outcome"] in NOT_SCORED])
    return 0


def verifier_of(section: Tree, overrides: Sequence[str]) -> VerifierConfig:
    """overrides: `verifier.key=value`, applied on top."""
    tree: Tree = {"verifier": section}
    for override in overrides:
        apply_override(tree, override)
    if others := sorted(tree.keys() - {"verifier"}):
        raise ConfigError(f"--set got a key of [{others[0]}], expected one of [verifier]; `verify` uses no other.")
    return resolve(tree).verifier


def say_first(what: str, notes: Sequence[str]) -> None:
    if notes:
        print(f"{len(notes)} of them could not be {what}, the first: {notes[0]}", file=sys.stderr)


def read_rows(source: Path, free: bool) -> list[Row | dict[str, Any]]:
    """Lines that are not blank: a Row to be scored, or the result of one that cannot be read. free: for functions."""
    wanted = "id and completion" if free else "id, completion and answer"
    lines = enumerate(input_lines(source, f"JSON lines with {wanted}"), start=1)
    return [read_row(line, f"{source}, line {number}", number, wanted, free) for number, line in lines if line.strip()]


def input_lines(source: Path | None, wanted: str) -> list[bytes]:
    """The lines of the file that --in names, without the mark that some editors put before the first character.
    DataError if it is not a file. wanted: what it should have been."""
    if source is None or not os.path.isfile(source):
        raise DataError(f"--in got {source}, which is not a file; give {wanted}.")
    # Not splitlines(), which also ends a line at characters that a text may have, such as a carriage return.
    return source.read_bytes().removeprefix(codecs.BOM_UTF8).split(b"\n")


def read_row(line: bytes, where: str, number: int, wanted: str, free: bool) -> Row | dict[str, Any]:
    try:
        return row_of_any_columns(line) if free else row_with_answer(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, DataError) as error:
        words = str(error).replace("`", "'").rstrip(".")
        note = f"{where}: {words}; expected an object with {wanted}."
        return {"id": number, "outcome": Outcome.UNPARSABLE, "score": 0.0, "final_answer": None, "note": note}


def row_with_answer(line: bytes) -> Row:
    row = msgspec.json.decode(line, type=Answered)
    answer = plain_number(row.answer) if isinstance(row.answer, float) else str(row.answer)
    return Row(id=row.id, job=job(row.completion, {"answer": answer}))


def row_of_any_columns(line: bytes) -> Row:
    """With the columns that a run on such rows has. The id is none of them, so that lines can be a group."""
    row, given = msgspec.json.decode(line, type=Completion), msgspec.json.decode(line, type=dict[str, Any])
    others = {name: value for name, value in given.items() if name not in ("id", "completion")}
    question = "question" if "question" in others else "prompt"
    return Row(id=row.id, job=job(row.completion, canonical(others, {"question": question, "answer": "answer"})))


def job(completion: str, columns: dict[str, str]) -> ScoreJob:
    """The file does not say whether a completion reached a cap, so none counts as truncated. As in a run, functions get
    messages, unless verifier.form is `text`."""
    return ScoreJob(
        prompt=columns.get("question", ""),
        completion=completion,
        completion_ids=[],
        truncated=False,
        columns=columns,
        context=Context(chat=True),
    )


def result(name: str | int, verdict: Verdict) -> dict[str, Any]:
    found = {"id": name, "outcome": verdict.outcome, "score": verdict.score, "final_answer": verdict.final_answer}
    rewards = {"rewards": verdict.rewards} if verdict.rewards else {}
    return found | rewards | ({"note": verdict.note} if verdict.outcome in NOT_SCORED else {})
