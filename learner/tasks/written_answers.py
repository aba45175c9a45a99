"""Answers that somebody wrote, for a warm start (`python -m launch sft`): prompts, and the tokens to learn.

    sft.source = ""      the training tasks of [tasks] with their solutions, prompted as a run prompts them
    a column of chats    every answer of the assistant, with all messages before it as its prompt
    two columns          question and solution, each text or a list of {role, content}: TRL's prompt and completion

The loss is on the answer's tokens and the one that ends its turn, never on a prompt. An answer in the middle of a chat
is an example of its own, rendered as the model will see it when it has to give that answer: templates that leave older
reasoning out would otherwise show the model what it never sees. This costs the earlier messages once for each answer.

Examples are dropped, and counted by their reason, where a run would drop the task or cut the answer off. Left out on
purpose: weights for single messages, and tools.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from learner.tasks.sources import as_configured, messages_of, open_dataset, without_examples
from learner.tasks.tasks import Task, TaskSet, earlier_messages, examples, first_two, load_rows, load_tasks
from shared.config.data import SYSTEM, SftConfig, TasksConfig, VerifierKind
from shared.errors import DataError
from shared.model.prompt import Message, Prompter, conversation

EXAMPLE = "example"
"""Column with the number of an example: where its answer is."""


@dataclass(frozen=True, kw_only=True)
class Written:
    """One answer to learn."""

    before: tuple[Message, ...]
    """The conversation that it answers."""
    answer: str
    """As text."""

    @property
    def question(self) -> str:
        return self.before[-1]["content"] if self.before else ""

    @property
    def system(self) -> str:
        return self.before[0]["content"] if self.before and self.before[0]["role"] == "system" else ""


def load_written(
    config: TasksConfig, sft: SftConfig, kind: VerifierKind, prompter: Prompter, *, longest: int, evaluated: bool
) -> TaskSet:
    """The examples as tasks, their answers, and the held-out tasks if they are evaluated; DataError if no example is
    left. longest: tokens of an answer."""
    found = list(written_answers(config, sft, kind))
    order = np.random.default_rng(config.seed).permutation(len(found))
    chosen = [found[place] for place in order[: config.limit or None]]
    tasks, answers, systems, dropped = rendered(chosen, config.max_prompt_tokens, longest, prompter)
    if not tasks:
        reasons = ", ".join(f"{count} {reason}" for reason, count in dropped.items()) or "it has no rows"
        raise DataError(f"{name_of(sft, config)} gave no answer to learn: {reasons}.")
    held_out = load_tasks(config, prompter, kind).held_out if evaluated else ()
    return TaskSet(train=tasks, held_out=held_out, dropped=dropped, answers=answers, systems=first_two(systems))


def name_of(sft: SftConfig, tasks: TasksConfig) -> str:
    return f"sft.source = '{sft.source}'" if sft.source else f"tasks.source = '{tasks.source}'"


def written_answers(tasks: TasksConfig, sft: SftConfig, kind: VerifierKind) -> Iterator[Written]:
    if not sft.source:
        yield from solutions(tasks, kind)
        return
    has = as_configured(sft.source, tasks)
    for row in open_dataset(sft.source, tasks.split or has.split, has, "sft.source"):
        yield from from_row(row, sft, tasks.system_prompt)


def solutions(tasks: TasksConfig, kind: VerifierKind) -> Iterator[Written]:
    """Of the training tasks; a row without a solution has its answer."""
    rows = load_rows(tasks, kind)[0]
    shots = examples(rows, tasks)
    for row in rows[tasks.few_shot :]:
        system = row.get(SYSTEM, tasks.system_prompt)
        before = tuple(conversation(row["question"], system, shots, earlier_messages(row)))
        yield Written(before=before, answer=row.get("solution") or row.get("answer", ""))


def from_row(row: Mapping[str, Any], sft: SftConfig, system_prompt: str) -> Iterator[Written]:
    if row.get(sft.chats) is not None:
        messages = messages_of(row[sft.chats], sft.chats, "user")
    elif sft.question in row and sft.solution in row:
        messages = messages_of(row[sft.question], sft.question, "user")
        messages += messages_of(row[sft.solution], sft.solution, "assistant")
    else:
        raise without_examples(sft, row)
    if system_prompt and messages and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system_prompt}, *messages]
    for place, message in enumerate(messages):
        if message["role"] == "assistant":
            yield Written(before=tuple(messages[:place]), answer=message["content"])


def rendered(
    found: Iterable[Written], longest_prompt: int, longest_answer: int, prompter: Prompter
) -> tuple[tuple[Task, ...], tuple[np.ndarray, ...], list[str], dict[str, int]]:
    """Tasks, answers, system messages, and dropped examples by reason."""
    tasks, answers, systems, dropped = list[Task](), list[np.ndarray](), list[str](), Counter[str]()
    for one in found:
        if not one.question.strip() or not one.answer.strip():
            dropped["without a question or an answer"] += 1
            continue
        ids, answer = prompter.chat_ids(one.before), prompter.reply_ids(one.before, one.answer)
        if len(ids) > longest_prompt:
            dropped[f"with a prompt of more than tasks.max_prompt_tokens = {longest_prompt}"] += 1
        elif len(answer) > longest_answer:
            dropped[f"with an answer of more than rollout.max_new_tokens = {longest_answer}"] += 1
        else:
            columns = {"question": one.question, EXAMPLE: str(len(tasks))}
            tasks.append(Task(prompt_ids=np.array(ids, dtype=np.int32), columns=columns))
            answers.append(np.array(answer, dtype=np.int32))
            systems.append(one.system)
    return tuple(tasks), tuple(answers), systems, dict(dropped)
