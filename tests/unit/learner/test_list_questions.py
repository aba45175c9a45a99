"""Questions about a list of numbers: their answers are right, and no question is for training and held out."""

import os
import re
from pathlib import Path

import pytest

from launch.presets.load import load_config
from learner.tasks.number_questions import KINDS, list_questions
from learner.tasks.tasks import load_tasks
from learner.tasks.word_problems import Split
from shared.config.data import TasksConfig
from shared.embedded import EMBEDDED_DIR
from shared.gold_answer import gold_number
from shared.model.prompt import Prompter, load_prompter

MODELS = os.environ.get("TANDEM_MODELS")
ASKED = re.compile(r"Which number is the (\w+)\? (\d\d(?:, \d\d){2,5})")


@pytest.fixture(scope="module")
def prompter() -> Prompter:
    return load_prompter(Path(EMBEDDED_DIR))


@pytest.mark.parametrize("split", ["train", "held_out"])
def test_answers_are_those_of_the_list(split: Split) -> None:
    found = list_questions(split, 600, seed=1)
    assert len({one.question for one in found}) == 600
    assert [one.kind for one in found[:6]] == ["largest", "smallest", "second"] * 2
    lengths: set[int] = set()
    for one in found:
        asked = ASKED.fullmatch(one.question)
        assert asked and asked[1] == one.kind
        numbers = [int(number) for number in asked[2].split(", ")]
        assert len(set(numbers)) == len(numbers)
        ordered = sorted(numbers)
        assert one.answer == {"largest": ordered[-1], "smallest": ordered[0], "second": numbers[1]}[one.kind]
        assert one.solution == f"The {one.kind} number is {one.answer}.\n#### {one.answer}"
        lengths.add(len(numbers))
    assert lengths == {3, 4, 5, 6}


def test_the_same_seed_gives_the_same_questions_and_the_splits_share_none() -> None:
    train, held_out = list_questions("train", 3000, seed=0), list_questions("held_out", 500, seed=0)
    assert list_questions("train", 100, seed=0) == train[:100] != list_questions("train", 100, seed=1)
    assert not {one.question for one in train} & {one.question for one in held_out}


def test_they_are_a_source_with_examples_of_each_kind(prompter: Prompter) -> None:
    tasks = load_tasks(TasksConfig(source="numbers", limit=30, few_shot=3, max_prompt_tokens=1000), prompter, "gsm8k")
    assert (len(tasks.train), len(tasks.held_out), tasks.dropped) == (30, 512, {})
    task = tasks.train[0]
    assert task.columns.keys() == {"question", "answer", "subject", "solution"}
    assert gold_number(task.columns["answer"]) is not None
    prompt = prompter.as_the_model_sees(task.prompt_ids.tolist())
    assert [asked[0] for asked in ASKED.findall(prompt)] == [*KINDS, task.columns["subject"]]
    assert prompt.count("####") == 3
    shown = {match[0] for match in list(ASKED.finditer(prompt))[:3]}
    assert len(shown) == 3 and not shown & {one.columns["question"] for one in tasks.train}


@pytest.mark.skipif(not MODELS, reason="TANDEM_MODELS names no folder of pretrained models")
def test_prompts_and_solutions_fit_the_caps_of_the_preset() -> None:
    prompter, config = load_prompter(Path(MODELS or "") / "smollm2-135m"), load_config("cpu_135m")
    tasks = load_tasks(config.tasks, prompter, config.verifier.kind)
    assert (len(tasks.train), len(tasks.held_out), tasks.dropped) == (config.tasks.limit, 512, {})
    solutions = [prompter.tokenizer(task.columns["solution"])["input_ids"] for task in tasks.train]
    assert max(map(len, solutions)) + 1 < config.rollout.max_new_tokens
