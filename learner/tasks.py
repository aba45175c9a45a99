"""The tasks of a run: questions as prompt ids, and the columns that the verifier will see.

Prompts longer than the limit are dropped and counted, never cut. Held-out tasks are never trained on.
Left out on purpose: streaming data sets; a run's tasks fit in memory.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np

from shared.config import TasksConfig
from shared.embedded.problems import problems
from shared.errors import DataError
from shared.prompt import Prompter

EMBEDDED_HELD_OUT = 512
FORMATS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
Columns = dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Task:
    """One question."""

    prompt_ids: np.ndarray
    """[Tp] int32, chat template applied."""
    columns: Columns
    """What the verifier gets: `question`, `answer`, and the rest of the row, all as text."""


@dataclass(frozen=True, kw_only=True)
class TaskSet:
    """All tasks of a run."""

    train: tuple[Task, ...]
    """To learn from."""
    held_out: tuple[Task, ...]
    """To evaluate on."""
    too_long: int
    """Rows dropped because their prompt exceeded the limit."""


def load_tasks(config: TasksConfig, prompter: Prompter) -> TaskSet:
    """Read, render, filter."""
    train_rows, held_out_rows = (list(rows) for rows in load_rows(config))
    train = [task for row in train_rows if (task := render(row, config, prompter))]
    held_out = [task for row in held_out_rows if (task := render(row, config, prompter))]
    if not train:
        raise DataError(f"tasks.source = '{config.source}' gave no task of at most {config.max_prompt_tokens} tokens.")
    too_long = len(train_rows) + len(held_out_rows) - len(train) - len(held_out)
    return TaskSet(train=tuple(train), held_out=tuple(held_out), too_long=too_long)


def load_rows(config: TasksConfig) -> tuple[Iterable[Columns], Iterable[Columns]]:
    """Train and held-out rows, with the canonical names `question` and `answer`."""
    if config.source == "embedded":
        limit = config.limit or 8192
        return embedded_rows("train", limit, config.levels), embedded_rows("held_out", EMBEDDED_HELD_OUT, config.levels)
    train = list(read_rows(config.source, config.split, config))
    if config.held_out:
        held_out = list(read_rows(*held_out_source(config), config))
    else:
        count = len(train) // 10
        train, held_out = train[: len(train) - count], train[len(train) - count :]
    return train[: config.limit or None], held_out


def embedded_rows(split: Literal["train", "held_out"], count: int, levels: tuple[int, ...]) -> Iterator[Columns]:
    """Problems of the embedded generator; the two splits share none."""
    for problem in problems(split, count=count, seed=0, levels=levels):
        yield {"question": problem.question, "answer": str(problem.answer), "level": str(problem.level)}


def held_out_source(config: TasksConfig) -> tuple[str, str]:
    """A file of its own, or another split of the same hub data set."""
    if Path(config.held_out).suffix in FORMATS:
        return config.held_out, "train"
    if Path(config.source).suffix in FORMATS:
        raise DataError(
            f"tasks.held_out = '{config.held_out}' is no {', '.join(FORMATS)} file, and a file has no splits;"
            " name a file, or leave it empty to hold out the last tenth."
        )
    return config.source, config.held_out


def read_rows(source: str, split: str, config: TasksConfig) -> Iterator[Columns]:
    """Rows of a file or hub data set through `datasets`."""
    for row in open_dataset(source, split):
        for column in (config.question, config.answer):
            if column not in row:
                raise DataError(
                    f"{source} has no column '{column}'; it has {', '.join(row)}: set tasks.question/answer."
                )
        yield canonical(row, config)


def open_dataset(source: str, split: str) -> Iterable[Any]:
    """Imported late: most runs of the embedded tasks never need it."""
    from datasets import load_dataset

    kind = FORMATS.get(Path(source).suffix)
    if kind and not Path(source).is_file():
        raise DataError(f"tasks.source or tasks.held_out names the file '{source}', which does not exist.")
    files: dict[str, Any] = {"data_files": {"train": source}, "split": "train"}
    try:
        # Its rows are typed as anything an index can give; iterating gives mappings.
        return cast(Any, load_dataset(kind, **files) if kind else load_dataset(source, split=split))
    except Exception as error:
        raise DataError(f"tasks.source = '{source}' cannot be read: {first_line(error)}") from error


def first_line(error: Exception) -> str:
    """Libraries put pages into their messages, or nothing."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def canonical(row: Mapping[str, Any], config: TasksConfig) -> Columns:
    """All columns as text, question and answer under their canonical names."""
    columns = {key: str(value) for key, value in row.items() if key not in (config.question, config.answer)}
    return columns | {"question": str(row[config.question]), "answer": str(row[config.answer])}


def render(columns: Columns, config: TasksConfig, prompter: Prompter) -> Task | None:
    """A task, or None if its prompt is too long."""
    ids = prompter.prompt_ids(columns["question"], config.system_prompt)
    if len(ids) > config.max_prompt_tokens:
        return None
    return Task(prompt_ids=np.array(ids, dtype=np.int32), columns=columns)
