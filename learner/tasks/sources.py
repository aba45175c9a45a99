r"""Reads rows: from the embedded problems, a named data set, a file, a folder of splits, or a data set of the hub.

    embedded                          problems that are generated here
    gsm8k, math, math500              on the hub, with the columns they have there
    FOLDER                            FOLDER/train.jsonl, FOLDER/test.csv, ...: one file per split. A folder with the
                                      name of a named data set is read like it, on machines without the hub. Also as
                                      the hub has it: train-00000-of-00002.parquet, ..., there or in FOLDER/data
    FILE.jsonl, .json, .csv, .parquet
    anything else                     a hub id, with `tasks.subset` and `tasks.split`

Every row gets the columns `question` and `answer` and, if the data has them, `level`, `subject` and `solution`; other
columns keep their names. A question may be a chat, as in TRL's data, that ends in a message of the user. A system
message at its beginning becomes the column `system_message`, and what is between the two `earlier_messages`. Reward
functions get each column with the name and value that it has in the data: values that were renamed, cut, turned into
text or are null are kept in the column `unconverted`, and so is a column whose name is empty or too long for the wire.
If the answer column has a whole solution, the gold answer is what follows `####` or is in the last box. GSM8K has no
levels, so the number of calculator notes in a solution is its level. There are three parts: training rows, held-out
rows to evaluate on during the run (tasks.py), and the test set, which training never reads.
`tasks.subset` and the names of columns are those of `tasks.source`, and of other data that has no name here.
Left out on purpose: streaming data sets; a run's tasks fit in memory.
"""

import csv
import glob
import json
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, cast

from protocol.limits import MAX_NAME_CHARS
from shared.config.data import EARLIER, SYSTEM, UNCONVERTED, SftConfig, TasksConfig, VerifierKind
from shared.config.model import is_path
from shared.errors import DataError, in_words
from shared.gold_answer import MARKER, boxes, plain_number

FORMATS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
GENERATED = ("embedded", "numbers", "calculations", "guessing")
CALCULATOR = re.compile(r"<<[^<>]*>>")
MAX_LISTED = 16
FIRST_BYTES = 10 * 2**20
ROLES = ("system", "user", "assistant", "tool")
MEMORY_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
Columns = dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Known:
    """A data set that is known by its name."""

    hub: str = ""
    """Its hub id."""
    subset: str = ""
    """Its configuration on the hub."""
    question: str = "question"
    """Column with the question."""
    answer: str = "answer"
    """Column with the gold answer, or with a solution that ends in it."""
    level: str = "level"
    """Column with the difficulty."""
    subject: str = "subject"
    """Column with the field."""
    split: str = "train"
    """Split to train on."""
    test: str = ""
    """Split to test on; empty if there is none."""


UNKNOWN = Known()
KNOWN = {
    "gsm8k": Known(hub="openai/gsm8k", subset="main", test="test"),
    "math": Known(
        hub="DigitalLearningGmbH/MATH-lighteval",
        question="problem",
        answer="solution",
        subject="type",
        test="test",
    ),
    "math500": Known(hub="HuggingFaceH4/MATH-500", question="problem", split="test"),
}


def known(source: str) -> Known:
    """Looked up by name, or by the name of its folder."""
    return KNOWN.get(local(source).name if local(source).is_dir() else source, UNKNOWN)


def local(source: str) -> Path:
    """Its path with `~` expanded, if it is a file or folder. Unlike Path.expanduser, no error without a home."""
    return Path(os.path.expanduser(source))


def is_file_name(source: str) -> bool:
    return Path(source).suffix.lower() in FORMATS


def training_rows(config: TasksConfig, *, needs_answer: bool) -> list[Columns]:
    split = config.split or known(config.source).split
    return list(read_rows("source", config.source, split, config, needs_answer=needs_answer))


def held_out_rows(config: TasksConfig, *, needs_answer: bool) -> list[Columns] | None:
    """The rows of `tasks.held_out`; None if it is empty."""
    if not config.held_out:
        return None
    place = place_of("held_out", config.held_out, config.source)
    return list(read_rows("held_out", *place, config, needs_answer=needs_answer))


def rows_of_test(config: TasksConfig, *, needs_answer: bool) -> list[Columns] | None:
    """The rows of `tasks.test`, or of the data set's own test split; None if there is neither."""
    place = place_of_test(config)
    key = "test" if config.test else "source"
    return list(read_rows(key, *place, config, needs_answer=needs_answer)) if place else None


def name_of_held_out(config: TasksConfig) -> str:
    """Where held-out tasks come from: `held_out.jsonl`, `gsm8k test`, or the training data that they are part of."""
    place = place_of("held_out", config.held_out, config.source) if config.held_out else (config.source,)
    return " ".join(filter(None, place))


def place_of_test(config: TasksConfig) -> tuple[str, str] | None:
    """Source and split of the test set."""
    if config.test:
        return place_of("test", config.test, config.source)
    split = split_of_test(config.source)
    trained_on = config.split or known(config.source).split
    return (config.source, split) if split and split != trained_on else None


def place_of(key: str, given: str, source: str) -> tuple[str, str]:
    """Source and split that a key of [tasks] names."""
    if is_file_name(given):
        return given, ""
    if given in KNOWN or local(given).is_dir():
        return given, split_of_test(given) or known(given).split
    if is_file_name(source) or source in GENERATED:
        raise DataError(
            f"tasks.{key} = '{given}' is not a {', '.join(FORMATS)} file, and tasks.source = '{source}' has no splits;"
            " name a file, or leave it empty."
        )
    return source, given


def split_of_test(source: str) -> str:
    """The split that a data set is tested on; empty if it has none."""
    if not local(source).is_dir():
        return known(source).test
    return "test" if known(source).split != "test" and split_files(local(source), "test") else ""


def split_files(folder: Path, split: str) -> list[Path]:
    """One file, or the parts in which the hub keeps a split."""
    whole = [file for suffix in FORMATS if (file := folder / f"{split}{suffix}").is_file()]
    parts = (sorted(place.glob(f"{glob.escape(split)}-*-of-*.parquet")) for place in (folder, folder / "data"))
    return whole[:1] or next(filter(None, parts), [])


def read_rows(key: str, source: str, split: str, config: TasksConfig, *, needs_answer: bool) -> Iterator[Columns]:
    """Raises DataError if a column that is needed is missing. key: of [tasks], which names the source."""
    has = as_configured(source, config)
    names = canonical_names(has)
    for row in open_dataset(source, split, has, f"tasks.{key}"):
        refuse_without_columns(row, has, key, source, config, needs_answer=needs_answer)
        if needs_answer and isinstance(row[has.answer], Mapping):
            raise DataError(
                f"The column '{has.answer}' has {str(row[has.answer])[:80]!r}, expected an answer as text or a number;"
                " write it into a column of its own, and set tasks.answer."
            )
        yield canonical(row, names)


def canonical_names(has: Known) -> Columns:
    """Each with the column that becomes it."""
    return {"question": has.question, "answer": has.answer, "level": has.level, "subject": has.subject}


def refuse_without_columns(
    found: Collection[str], has: Known, key: str, source: str, config: TasksConfig, *, needs_answer: bool
) -> None:
    """An answer that nobody needs must be there if tasks.answer names its column."""
    for column in (has.question, has.answer)[: 2 if needs_answer or config.answer else 1]:
        if column not in found:
            advice = "set tasks.question/answer" if source == config.source else "name them as in tasks.source"
            raise DataError(f"tasks.{key} = '{source}' has no column '{column}'; it has {first_few(found)}: {advice}.")


def local_columns(key: str, source: str, split: str) -> list[str]:
    """Of local data; empty if they are not known. DataError if the data are not there. key: what names the source."""
    files = local_files(key, source, split)
    return column_names(files[0]) if files else []


def column_names(file: Path) -> list[str]:
    """As the library of data sets finds them, without it; empty if it has to say itself what is wrong with the file. A
    .parquet file is left to it."""
    with suppress(OSError, ValueError, RecursionError, csv.Error):
        match file.suffix.lower():
            case ".csv":
                with file.open(encoding="utf-8-sig", errors="replace", newline="") as stream:
                    first = next(filter(None, csv.reader(stream)), [])
                return [name or f"Unnamed: {place}" for place, name in enumerate(first)]
            case ".json" | ".jsonl":
                return names_in_json(file)
    return []


def names_in_json(file: Path) -> list[str]:
    """Of one list, or of the first rows: the library takes the columns from as many."""
    with file.open("rb") as stream:
        text = stream.read(FIRST_BYTES) + stream.readline()
    is_list = text.lstrip().startswith(b"[")
    rows: list[Any] = json.loads(text) if is_list else [json.loads(line) for line in text.splitlines() if line.strip()]
    is_table = all(isinstance(row, Mapping) for row in rows)
    return list(dict.fromkeys(chain.from_iterable(rows))) if is_table else []


def without_examples(sft: SftConfig, found: Iterable[str]) -> DataError:
    return DataError(
        f"sft.source = '{sft.source}' has neither the column '{sft.chats}' nor '{sft.question}' and '{sft.solution}';"
        f" it has {first_few(found)}: set sft.chats, or sft.question and sft.solution."
    )


def needs_answers(config: TasksConfig, kind: VerifierKind) -> bool:
    """Whether rows must have a gold answer."""
    return kind not in ("callable", "environment") or config.few_shot > 0


def first_few(names: Iterable[str]) -> str:
    """For a sentence; a JSON object of rows looks like a row of as many columns."""
    listed = list(names)
    return ", ".join(listed[:MAX_LISTED]) + (f" and {len(listed) - MAX_LISTED} more" if listed[MAX_LISTED:] else "")


def as_configured(source: str, config: TasksConfig) -> Known:
    """Subset and columns of a source. The keys of [tasks] win, except over those of a named source other than
    tasks.source."""
    has = known(source)
    if has is not UNKNOWN and source != config.source:
        return has
    return replace(
        has,
        subset=config.subset or has.subset,
        question=config.question or has.question,
        answer=config.answer or has.answer,
        level=config.level or has.level,
        subject=config.subject or has.subject,
    )


def open_dataset(source: str, split: str, has: Known, key: str) -> Iterable[Any]:
    """Imports `datasets` only here, since runs on the embedded tasks do not need it. key: what names the source."""
    from datasets import disable_progress_bars, load_dataset

    disable_progress_bars()
    files = local_files(key, source, split)
    try:
        # Its rows are typed as anything an index can give; iterating gives mappings.
        if files:
            options: dict[str, Any] = {"data_files": {"train": [glob.escape(str(file)) for file in files]}}
            return cast(Any, load_dataset(FORMATS[files[0].suffix.lower()], split="train", **options))
        return cast(Any, load_dataset(has.hub or source, has.subset or None, split=split))
    except Exception as error:
        advice = "" if files else " (a machine without the hub can read a folder with train.jsonl and test.jsonl)"
        # Of a file, `datasets` itself says only that it failed.
        cause = (error.__cause__ if files else None) or error
        raise DataError(f"{key} = '{source}' cannot be read: {in_words(cause)}{advice}") from error


def local_files(key: str, source: str, split: str) -> list[Path]:
    """The local files to read; none for the hub. DataError if they are missing or empty. key: what names the source."""
    path, is_table = local(source), is_file_name(source)
    if path.is_dir() and not is_table:
        files = files_of_split(key, source, split)
    else:
        files = [path] if path.is_file() and is_table else []
    if empty := next((file for file in files if not file.stat().st_size), None):
        raise DataError(f"{key} = '{source}': {empty} is empty; it needs a row with a question.")
    # An id without an owner has no suffix.
    if not is_table and not path.is_dir() and (path.is_file() or ("/" not in source and path.suffix[1:2].isalpha())):
        raise DataError(
            f"{key} names the file '{source}', expected one that ends in {', '.join(FORMATS)}; write the rows as one of"
            " these."
        )
    if not files and (is_table or is_path(source)):
        raise DataError(
            f"{key} names the {'file' if is_table else 'folder'} '{source}', which does not exist; check it (a relative"
            f" path begins in {Path.cwd()})."
        )
    return files


def files_of_split(key: str, source: str, split: str) -> list[Path]:
    if files := split_files(local(source), split):
        return files
    raise DataError(
        f"{key}: the folder '{source}' holds no {split}.jsonl (nor {split}.json, .csv, .parquet, nor"
        f" data/{split}-*-of-*.parquet); set tasks.split, or write the rows there as {split}.parquet, with"
        " `to_parquet` if `save_to_disk` made it."
    )


def canonical(row: Mapping[str, Any], names: Mapping[str, str]) -> Columns:
    """All columns as text, under their canonical names, without empty ones and names that the wire does not take. A
    column may have several of these names. If a configured column becomes `answer`, one that is called `answer` already
    is left out."""
    asked = row.get(names["question"])
    chat = chat_of(asked, names["question"]) if isinstance(asked, list | dict) else {}
    ours = {column: [name for name, other in names.items() if other == column] for column in names.values()}
    taken = {SYSTEM, EARLIER, *(name for name, column in names.items() if column in row)} - ours.keys()
    columns = {
        name: as_text(value)
        for key, value in row.items()
        if value is not None and key not in taken
        for name in ours.get(key, [key])
        if 0 < len(name) <= MAX_NAME_CHARS
    }
    columns = {"question": ""} | columns | chat
    if "level" in columns:
        columns["level"] = columns["level"].removeprefix("Level ")
    columns |= split_solution(columns.get("answer", ""), columns) if "answer" in columns else {}
    nulls = {name: None for name, column in names.items() if column in row and row[column] is None}
    return columns | unconverted({**nulls, **row}, columns)


def chat_of(asked: object, column: str) -> Columns:
    """Question, system message and what is between them. A question is always asked by the user."""
    messages = messages_of(asked, column, "user")
    roles = [message["role"] for message in messages]
    if roles[-1:] != ["user"] or "system" in roles[1:]:
        raise DataError(
            f"The column '{column}' has a chat of the messages {', '.join(roles) or 'none'}, expected one that ends in"
            " a message of the user, with a system message at its beginning or none; correct that row."
        )
    begins = int(roles[0] == "system")
    system = {SYSTEM: messages[0]["content"]} if begins else {}
    earlier = {EARLIER: json.dumps(messages[begins:-1], ensure_ascii=False)} if messages[begins:-1] else {}
    return {"question": messages[-1]["content"]} | system | earlier


def messages_of(value: Any, column: str, role: str) -> list[dict[str, Any]]:
    """role: of plain text."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    whole = isinstance(value, Sequence) and all(
        isinstance(message, Mapping) and message.get("role") in ROLES and isinstance(message.get("content"), str)
        for message in value
    )
    if not whole:
        raise DataError(
            f"The column '{column}' has {str(value)[:80]!r}, expected text or a list of messages with a role"
            f" ({', '.join(ROLES)}) and content as text; correct that row."
        )
    return [{"role": message["role"], "content": message["content"]} for message in value]


def as_text(value: object) -> str:
    """The same text in every process: without the memory address that Python puts into that of a picture, say."""
    if isinstance(value, float):
        return plain_number(value)
    return value if isinstance(value, str) else MEMORY_ADDRESS.sub("", str(value))


def unconverted(row: Mapping[str, Any], columns: Columns) -> Columns:
    """What the text columns lack for a function that reads the row: other types, nulls, names that were replaced, and
    text that was cut."""
    kept: dict[str, Any] = {}
    for key, value in row.items():
        if isinstance(value, str) and value == columns.get(key):
            continue
        # A date or a picture, say, stays text.
        with suppress(TypeError, ValueError):
            json.dumps(value)
            kept[key] = value
    return {UNCONVERTED: json.dumps(kept, ensure_ascii=False)} if kept else {}


def split_solution(written: str, columns: Columns) -> Columns:
    """Separate the gold answer from a solution in the same column. GSM8K's calculator notes are counted and dropped."""
    found = boxes(written)
    if MARKER in written:
        answer = written.rpartition(MARKER)[2].strip()
    elif found:
        answer = found[-1][2].strip()
    else:
        return {"answer": written}
    plain, calculations = CALCULATOR.subn("", written)
    level = {"level": columns.get("level", str(calculations))} if calculations else {}
    return level | {"solution": columns.get("solution", plain), "answer": answer}
