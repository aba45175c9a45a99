"""Questions that end a chat of several turns: how rows keep the earlier ones, and where they are asked."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from actor.verifiers.reward_arguments import as_in_the_data
from learner.evaluation.evaluate import digest_of_questions
from learner.tasks.overlap import find_overlap
from learner.tasks.sources import canonical
from learner.tasks.tasks import load_tasks, told_prompts
from learner.tasks.written_answers import written_answers
from shared.config.data import EARLIER, SYSTEM, SftConfig, TasksConfig
from shared.embedded import EMBEDDED_DIR
from shared.errors import DataError
from shared.model.prompt import Prompter, load_prompter

NAMES = {"question": "prompt", "answer": "answer", "level": "level", "subject": "subject"}
SYSTEM_MESSAGE = {"role": "system", "content": "Be brief."}
ASKED = {"role": "user", "content": "And 2?"}
EARLIER_TURNS = [{"role": "user", "content": "1?"}, {"role": "assistant", "content": "One."}]


def write_jsonl(path: Path, data: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in data))
    return path


@pytest.fixture(scope="module")
def prompter() -> Prompter:
    return load_prompter(EMBEDDED_DIR)


@pytest.mark.parametrize("begins", [[], [SYSTEM_MESSAGE]])
def test_a_question_may_end_a_chat_of_several_turns(begins: list[dict[str, str]]) -> None:
    earlier = [{"role": "user", "content": "Gr\u00f6\u00dfe?"}, {"role": "assistant", "content": "1"}]
    row = {"prompt": [*begins, *earlier, ASKED], "answer": "2", EARLIER: "of the data"}
    found = canonical(row, NAMES)
    assert found["question"] == "And 2?" and found.get(SYSTEM) == ("Be brief." if begins else None)
    assert json.loads(found[EARLIER]) == earlier
    assert as_in_the_data(found) == {"question": "And 2?", "gold_answer": "2"} | row


def test_a_question_of_several_turns_is_asked_after_the_earlier_ones(tmp_path: Path, prompter: Prompter) -> None:
    data = [{"question": [SYSTEM_MESSAGE, *EARLIER_TURNS, ASKED], "solution": "Two.", "answer": "2"}]
    source = write_jsonl(tmp_path / "t.jsonl", data * 2)
    config = TasksConfig(source=str(source), held_out=str(source))
    seen = load_tasks(config, prompter, "callable").train
    expected = prompter.chat_ids([SYSTEM_MESSAGE, *EARLIER_TURNS, ASKED])
    assert [task.prompt_ids.tolist() for task in seen] == [expected] * 2
    (told,) = told_prompts(seen, "Hint.", config, prompter, "callable").values()
    told_system = {"role": "system", "content": "Be brief.\nHint."}
    assert told.tolist() == prompter.chat_ids([told_system, *EARLIER_TURNS, ASKED])
    written = next(written_answers(config, SftConfig(), "callable"))
    assert written.before == (SYSTEM_MESSAGE, *EARLIER_TURNS, ASKED) and written.answer == "Two."
    with pytest.raises(DataError, match="the question of row 1 is a chat of several turns; put rows of one question"):
        load_tasks(replace(config, few_shot=1), prompter, "callable")


def test_the_system_messages_of_a_run_are_noted(tmp_path: Path, prompter: Prompter) -> None:
    told, plain = {"question": [SYSTEM_MESSAGE, ASKED], "answer": "2"}, {"question": [ASKED], "answer": "2"}
    config = TasksConfig(source=str(tmp_path / "t.jsonl"), system_prompt="Be kind.")
    for data, systems in (
        ([told] * 3, {"Be brief."}),
        ([plain] * 3, {"Be kind."}),
        ([told, plain], {"Be brief.", "Be kind."}),
    ):
        write_jsonl(tmp_path / "t.jsonl", data)
        found = load_tasks(config, prompter, "gsm8k").digests().systems
        assert {*found} == systems and len(found) == len(systems)


def test_questions_of_equal_words_differ_by_what_was_said_before(tmp_path: Path, prompter: Prompter) -> None:
    asked = {"role": "user", "content": "And then, what is the next number of this whole list?"}
    chats = [[{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": "Yes."}, asked] for n in range(20)]
    source = write_jsonl(tmp_path / "t.jsonl", [{"question": chat, "answer": "1"} for chat in chats * 2])
    tasks = load_tasks(TasksConfig(source=str(source)), prompter, "gsm8k")
    assert len({digest_of_questions([task]) for task in (*tasks.train, *tasks.held_out)}) == 20
    train, held_out = ({bytes(task.prompt_ids) for task in part} for part in (tasks.train, tasks.held_out))
    assert (len(train), len(held_out)) == (18, 2) and not train & held_out
    parts = ([task.columns for task in part] for part in (tasks.train, tasks.held_out))
    assert find_overlap(*parts).in_words() == [
        "18 training questions occur more than once, word for word",
        "4 held-out questions share 80% of their 8-grams with another training question",
    ]
