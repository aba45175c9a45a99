"""The tasks of a run: questions as prompt ids, and the columns for the verifier.

    rows (sources.py) -> few-shot examples removed, with their copies -> shuffled by tasks.seed -> held out -> limit
    -> dropped or rendered

A row is dropped, and counted by its reason, if its question is empty, its gold answer cannot be read by the verifier,
its prompt is too long, or its columns are too large for the wire. Rows are never shortened. Held-out tasks are never
trained on, and a training run does not read the test set. Both have a seeded order, so the first n are a random sample.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from learner.tasks.number_questions import calculations, games, list_questions
from learner.tasks.sources import GENERATED, Columns, held_out_rows, needs_answers, rows_of_test, training_rows
from learner.tasks.word_problems import Split, problems
from protocol.limits import MAX_KEYS, MAX_TEXT_CHARS
from shared.config.data import EARLIER, SYSTEM, UNCONVERTED, TasksConfig, VerifierKind
from shared.errors import DataError
from shared.gold_answer import gold_number
from shared.model.prompt import Message, Prompter, Shots

GENERATED_HELD_OUT = 512
MAX_FORMULA_CHARS = 500
MAX_ROW_BYTES = 7 * 2**20
"""Of the columns of a row: less than the body of a message, which has the seeds and ids of an order too."""
COLUMN = re.compile(r"\{(\w+)\}")
Rows = Sequence[Columns]


@dataclass(frozen=True, kw_only=True)
class Task:
    """One question."""

    prompt_ids: np.ndarray
    """[Tp] int32, chat template applied."""
    columns: Columns
    """For the verifier: `question`, `answer`, and the rest of the row, all as text."""


@dataclass(frozen=True, kw_only=True)
class TaskSet:
    """All tasks of a run."""

    train: tuple[Task, ...]
    """To learn from."""
    held_out: tuple[Task, ...]
    """To evaluate on."""
    dropped: Mapping[str, int]
    """Number of dropped rows of both parts, by reason."""
    answers: tuple[np.ndarray, ...] = ()
    """[T] int32 each: what a warm start learns of the training tasks, in their order."""
    systems: tuple[str, ...] = ()
    """System messages of the training tasks, at most two: one if it is the same in all, and empty text for none."""

    def digests(self) -> "TaskDigests":
        return TaskDigests(
            train=len(self.train),
            train_sha256=digest_of_tasks(self.train, self.answers),
            held_out=len(self.held_out),
            held_out_sha256=digest_of_tasks(self.held_out),
            systems=self.systems,
        )


class TaskDigests(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Number and digest of the tasks of a run, to tell whether they are the same, and what all of them begin with.
    Where they are stored makes no difference."""

    train: int
    """Number of training tasks."""
    train_sha256: str
    """Over their prompts and columns in order, and the answers of a warm start."""
    held_out: int
    """Number of held-out tasks."""
    held_out_sha256: str
    """Over their prompts and columns in order."""
    systems: tuple[str, ...] = ()
    """As in TaskSet; none in a run of an earlier version."""

    def difference_in_words(self, now: "TaskDigests") -> str:
        """Which tasks differ from these; empty if all are the same."""
        parts = (
            ("training", self.train, self.train_sha256, now.train, now.train_sha256),
            ("held-out", self.held_out, self.held_out_sha256, now.held_out, now.held_out_sha256),
        )
        return " and ".join(
            f"{before} {name} tasks (sha256 {digest[:12]}), now {after} ({other[:12]})"
            for name, before, digest, after, other in parts
            if digest != other
        )


def digest_of_tasks(tasks: Sequence[Task], answers: Sequence[np.ndarray] = ()) -> str:
    """sha256 over prompts, columns and answers, in order."""
    found = hashlib.sha256()
    for task in tasks:
        found.update(task.prompt_ids.tobytes())
        found.update(msgspec.json.encode(sorted(task.columns.items())) + b"\n")
    for answer in answers:
        found.update(answer.tobytes() + b"\n")
    return found.hexdigest()


def load_tasks(config: TasksConfig, prompter: Prompter, kind: VerifierKind) -> TaskSet:
    """DataError if no training task is left."""
    train_rows, held_out_rows, copies = load_rows(config, kind)
    shots = examples(train_rows, config)
    dropped = Counter(copies)
    train = kept(train_rows[config.few_shot :], config, prompter, kind, shots, dropped)
    held_out = kept(held_out_rows, config, prompter, kind, shots, dropped)
    if not train:
        reasons = ", ".join(f"{count} {reason}" for reason, count in dropped.items()) or "it has no rows"
        raise DataError(f"tasks.source = '{config.source}' gave no task to train on: {reasons}.")
    systems = first_two(task.columns.get(SYSTEM, config.system_prompt) for task in train)
    return TaskSet(train=train, held_out=held_out, dropped=dict(dropped), systems=systems)


def first_two(systems: Iterable[str]) -> tuple[str, ...]:
    """Different ones: whether there are more makes no difference."""
    return tuple(dict.fromkeys(systems))[:2]


def missing_answers(tasks: Sequence[Task]) -> str:
    """In words; empty if each has one, or the data have no such column."""
    count = sum(
        "answer" not in task.columns and "answer" in json.loads(task.columns.get(UNCONVERTED, "{}")) for task in tasks
    )
    return f"{count} of {len(tasks)} tasks have no answer: functions get None as their answer" if count else ""


def load_test(
    config: TasksConfig, prompter: Prompter, kind: VerifierKind
) -> tuple[tuple[Task, ...], Mapping[str, int]]:
    """The test set, with the same few-shot examples as training, and its dropped rows by reason."""
    rows = rows_of_test(config, needs_answer=needs_answers(config, kind))
    if not rows:
        return (), {}
    shown = load_rows(config, kind)[0][: config.few_shot] if config.few_shot else ()
    others = without_copies(shuffled(rows, config.seed), shown)
    dropped = Counter(dropped_copies(len(rows) - len(others)))
    return kept(others, config, prompter, kind, examples(shown, config), dropped), dropped


def told_prompts(
    tasks: Sequence[Task], text: str, config: TasksConfig, prompter: Prompter, kind: VerifierKind
) -> dict[bytes, np.ndarray]:
    """By the bytes of each task's prompt: the prompt with this text as a further part of the system message. {name} in
    it is a column of the task."""
    shots = examples(load_rows(config, kind)[0], config) if config.few_shot else ()
    found: dict[bytes, np.ndarray] = {}
    for task in tasks:
        if task.prompt_ids.tobytes() not in found:
            own = task.columns.get(SYSTEM, config.system_prompt)
            system = "\n".join(filter(None, (own, filled_in(text, task.columns))))
            ids = prompter.prompt_ids(task.columns["question"], system, shots, earlier_messages(task.columns))
            found[task.prompt_ids.tobytes()] = np.array(ids, dtype=np.int32)
    return found


def filled_in(text: str, columns: Columns) -> str:
    def value(match: re.Match[str]) -> str:
        if match[1] not in columns:
            raise DataError(
                f"teacher.prompt names the column {match[0]}, which a task lacks; it has {', '.join(columns)}."
            )
        return columns[match[1]]

    return COLUMN.sub(value, text)


def load_rows(config: TasksConfig, kind: VerifierKind) -> tuple[Rows, Rows, Mapping[str, int]]:
    """Training and held-out rows, and the number of those that were copies of an example. The first `tasks.few_shot`
    training rows are the examples."""
    named = held_out_rows(config, needs_answer=needs_answers(config, kind))
    held_out = None if named is None else shuffled(named, config.seed)
    if config.source in GENERATED:
        count = (config.limit or 8192) + config.few_shot
        own = generated_rows("held_out", GENERATED_HELD_OUT, config) if held_out is None else held_out
        return generated_rows("train", count, config), own, {}
    rows = training_rows(config, needs_answer=needs_answers(config, kind))
    shown, others = rows[: config.few_shot], shuffled(rows[config.few_shot :], config.seed)
    train, tested = without_copies(others, shown), without_copies(held_out or [], shown)
    copies = dropped_copies(len(others) - len(train) + len(held_out or []) - len(tested))
    if held_out is None:
        train, tested = divided(train)
    return [*shown, *train[: config.limit or None]], tested, copies


def without_copies(rows: list[Columns], shown: Rows) -> list[Columns]:
    """Without rows that have the question and answer of an example, since the answer would be in their own prompt. If
    all rows are like that, they stay: they differ in other columns."""
    copied = {(unspaced(row), row.get("answer")) for row in shown}
    return [row for row in rows if (unspaced(row), row.get("answer")) not in copied] or rows


def dropped_copies(count: int) -> Mapping[str, int]:
    return {"with the question and answer of an example": count} if count else {}


def examples(train_rows: Rows, config: TasksConfig) -> Shots:
    """DataError if one of them has nothing to show."""
    return tuple(shot(row, number, config) for number, row in enumerate(train_rows[: config.few_shot], start=1))


def shot(row: Columns, number: int, config: TasksConfig) -> tuple[str, str]:
    question, answer = row["question"], row.get("solution") or row.get("answer", "")
    if EARLIER in row:
        raise DataError(
            f"tasks.few_shot = {config.few_shot} shows the first rows of tasks.source = '{config.source}' with their"
            f" answers, but the question of row {number} is a chat of several turns; put rows of one question first,"
            " or set a smaller tasks.few_shot."
        )
    if question.strip() and answer.strip():
        return question, answer
    raise DataError(
        f"tasks.few_shot = {config.few_shot} shows the first rows of tasks.source = '{config.source}' with their"
        f" answers, but row {number} has no {'answer' if question.strip() else 'question'}; put whole rows first, or"
        " set a smaller tasks.few_shot."
    )


def divided(rows: list[Columns]) -> tuple[list[Columns], list[Columns]]:
    """All but the last tenth of the questions, and the last tenth, each with every copy, so that none is in both."""
    start = len(rows) - len(rows) // 10
    questions = list(dict.fromkeys(map(unspaced, rows)))
    if start == len(rows) or len(questions) == 1:
        # Rows with the same question differ in other columns, for a reward function or an environment.
        return rows[:start], rows[start:]
    kept_back = set(questions[-max(1, len(questions) // 10) :])
    parts: tuple[list[Columns], list[Columns]] = ([], [])
    for row in rows:
        parts[unspaced(row) in kept_back].append(row)
    return parts


def unspaced(row: Columns) -> str:
    """The whole question with single spaces, for comparison."""
    return " ".join(whole_question(row).split())


def whole_question(row: Mapping[str, str]) -> str:
    """Its question, after what was said before it."""
    return "\n".join([*(message["content"] for message in earlier_messages(row)), row["question"]])


def earlier_messages(row: Mapping[str, str]) -> list[Message]:
    """Of a chat that ends in the question."""
    return json.loads(row.get(EARLIER, "[]"))


def generated_rows(split: Split, count: int, config: TasksConfig) -> Rows:
    """Problems that are made here; the two splits share none."""
    match config.source:
        case "numbers":
            return [
                {"question": q.question, "answer": str(q.answer), "subject": q.kind, "solution": q.solution}
                for q in list_questions(split, count, seed=0)
            ]
        case "calculations":
            return [
                {"question": c.question, "answer": str(c.answer), "subject": c.op}
                for c in calculations(split, count, seed=0)
            ]
        case "guessing":
            return [{"question": g.question, "answer": str(g.secret)} for g in games(split, count, seed=0)]
        case _:
            return [
                {"question": p.question, "answer": str(p.answer), "level": str(p.level), "solution": p.solution}
                for p in problems(split, count=count, seed=0, levels=config.levels)
            ]


def shuffled(rows: list[Columns], seed: int) -> list[Columns]:
    """A file may be sorted by difficulty, so its first rows are no random sample."""
    return [rows[place] for place in np.random.default_rng(seed).permutation(len(rows))]


def kept(
    rows: Rows, config: TasksConfig, prompter: Prompter, kind: VerifierKind, shots: Shots, dropped: Counter[str]
) -> tuple[Task, ...]:
    """The rows that become tasks; adds the others to `dropped`."""
    tasks: list[Task] = []
    for row in rows:
        reason = fault_of(row, kind)
        system = row.get(SYSTEM, config.system_prompt)
        ids = [] if reason else prompter.prompt_ids(row["question"], system, shots, earlier_messages(row))
        if len(ids) > config.max_prompt_tokens:
            reason = f"with a prompt of more than tasks.max_prompt_tokens = {config.max_prompt_tokens}"
        if reason:
            dropped[reason] += 1
        else:
            tasks.append(Task(prompt_ids=np.array(ids, dtype=np.int32), columns=row))
    return tuple(tasks)


def fault_of(row: Columns, kind: VerifierKind) -> str | None:
    """Why a row cannot be a task; None if it can."""
    if not row["question"].strip():
        return "without a question"
    if not is_readable(row.get("answer", ""), kind):
        return f"with a gold answer that verifier.kind = '{kind}' cannot read"
    if len(row) > MAX_KEYS or any(len(value) > MAX_TEXT_CHARS for value in row.values()):
        return f"with more than {MAX_KEYS} columns or a column of more than {MAX_TEXT_CHARS} characters"
    if len(msgspec.msgpack.encode(row)) > MAX_ROW_BYTES:
        return f"with more than {MAX_ROW_BYTES >> 20} MiB of columns"
    return None


def is_readable(answer: str, kind: VerifierKind) -> bool:
    """Whether the verifier can read this gold answer. Formulas are only parsed in workers that can be killed."""
    match kind:
        case "callable" | "environment":
            return True
        case "math":
            return bool(answer.strip()) and len(answer) <= MAX_FORMULA_CHARS and answer.count("{") == answer.count("}")
        case _:
            return gold_number(answer) is not None
