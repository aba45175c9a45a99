"""`data`: what a run would be trained on: counts, lengths, dropped rows with reasons, duplicates, leaks between
training and evaluation, and examples exactly as the model sees them.

Reads the same data as the learner, in the same order. Downloads the model if it is missing, but does not quantise it.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain

import numpy as np

from launch.presets.load import load_config
from learner.tasks.overlap import find_overlap
from learner.tasks.tasks import Task, TaskSet, load_tasks, load_test, missing_answers
from protocol.plain_text import for_terminal
from shared.base.cache import find_model
from shared.model.prompt import Prompter, load_prompter

SHOWN = 3
"""Questions of each kind of overlap."""
WIDTH = 100
UNKNOWN = "-"


def show_data(*, source: str, overrides: Sequence[str], examples: int) -> int:
    config = load_config(source, overrides)
    prompter = load_prompter(find_model(config.model).folder, config.environment)
    tasks = load_tasks(config.tasks, prompter, config.verifier.kind)
    test, dropped = load_test(config.tasks, prompter, config.verifier.kind)
    tasks = replace(tasks, dropped=Counter(tasks.dropped) + Counter(dropped))
    print(f"source    {config.tasks.source}, scored by verifier.kind = {config.verifier.kind}")
    print("\n".join(report(tasks, test, prompter, examples)))
    return 0


def report(tasks: TaskSet, test: Sequence[Task], prompter: Prompter, examples: int) -> Iterator[str]:
    shown = (example(number, task, prompter) for number, task in enumerate(tasks.train[:examples], start=1))
    return map(for_terminal, chain(amounts(tasks, test), overlap(tasks, test), table(tasks, test), *shown))


def amounts(tasks: TaskSet, test: Sequence[Task]) -> Iterator[str]:
    for name, part in (("train", tasks.train), ("held out", tasks.held_out), ("test", test)):
        yield f"{name:<9} {len(part)} tasks{lengths(part)}"
    for reason, count in tasks.dropped.items():
        yield f"left out  {count} rows {reason}"
    if not tasks.dropped:
        yield "left out  nothing"
    if said := missing_answers([*tasks.train, *tasks.held_out, *test]):
        yield f"answers   {said}"


def lengths(part: Sequence[Task]) -> str:
    """Of the prompts, in tokens."""
    if not part:
        return ""
    tokens = [len(task.prompt_ids) for task in part]
    middle, high = np.median(tokens), np.quantile(tokens, 0.95)
    return f", prompts of {min(tokens)} to {max(tokens)} tokens, median {middle:.0f}, 95 % up to {high:.0f}"


def overlap(tasks: TaskSet, test: Sequence[Task]) -> Iterator[str]:
    """Duplicates in the training tasks, and held-out or test tasks that are trained on too."""
    trained_on = [task.columns for task in tasks.train]
    held_out = find_overlap(trained_on, [task.columns for task in tasks.held_out])
    tested = find_overlap(trained_on, [task.columns for task in test])
    sentences = [*held_out.in_words(), *tested.leaks_in_words("test")]
    yield from (f"twice     {sentence}" for sentence in sentences or ["nothing"])
    yield from first_few("duplicate", held_out.duplicates, tasks.train)
    for found, part in ((held_out, tasks.held_out), (tested, test)):
        yield from first_few("leaked", found.leaked, part)
        yield from first_few("near", found.near, part)


def first_few(name: str, places: Sequence[int], part: Sequence[Task]) -> Iterator[str]:
    for place in places[:SHOWN]:
        question = " ".join(part[place].columns["question"].split())
        yield f"          {name}: {question if len(question) <= WIDTH else question[: WIDTH - 3] + '...'}"


def table(tasks: TaskSet, test: Sequence[Task]) -> Iterator[str]:
    """Tasks by subject and level, if the data set has either column."""
    train, held_out, tested = (Counter(map(cell, part)) for part in (tasks.train, tasks.held_out, test))
    cells = sorted(train | held_out | tested)
    if cells in ([], [(UNKNOWN, UNKNOWN)]):
        return
    width = max(len("subject"), *(len(subject) for subject, _ in cells))
    yield f"\n{'subject':<{width}}  {'level':<5}  {'train':>6}  {'held out':>8}  {'test':>6}"
    for subject, level in cells:
        amount = f"{train[subject, level]:>6}  {held_out[subject, level]:>8}  {tested[subject, level]:>6}"
        yield f"{subject:<{width}}  {level:<5}  {amount}"


def cell(task: Task) -> tuple[str, str]:
    return task.columns.get("subject", UNKNOWN), task.columns.get("level", UNKNOWN)


def example(number: int, task: Task, prompter: Prompter) -> Iterator[str]:
    """The whole prompt with its special tokens, and the columns that the verifier gets."""
    yield f"\nexample {number}, {len(task.prompt_ids)} tokens, as the model sees it"
    yield from (f"  | {line}" for line in prompter.as_the_model_sees(task.prompt_ids.tolist()).split("\n"))
    for name, value in task.columns.items():
        if name != "question":
            yield f"  {name}: {' '.join(value.split())[:WIDTH]}"
