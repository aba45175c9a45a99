"""Tasks from the embedded generator and from files of every kind, through the real `datasets`."""

import csv
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from learner.orders.orders import build_orders
from learner.tasks.tasks import TaskSet, divided, is_readable, load_tasks, load_test, told_prompts
from protocol.codec import encode
from protocol.messages import Sampling
from shared.config.data import TasksConfig, VerifierKind
from shared.embedded import EMBEDDED_DIR
from shared.errors import DataError
from shared.model.prompt import Prompter, load_prompter

Row = dict[str, Any]

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture(scope="module")
def prompter() -> Prompter:
    return load_prompter(EMBEDDED_DIR)


def rows(count: int, first: int = 0) -> list[Row]:
    return [{"question": f"What is {n} + 1?", "answer": n + 1, "kind": "sum"} for n in range(first, first + count)]


def write_jsonl(path: Path, data: Sequence[Row]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in data))
    return path


def write_csv(path: Path, data: Sequence[Row]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, data[0].keys())
        writer.writeheader()
        writer.writerows(data)
    return path


def write_parquet(path: Path, data: Sequence[Row]) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(list(data)), path)
    return path


def questions(tasks: TaskSet) -> tuple[list[str], list[str]]:
    return [t.columns["question"] for t in tasks.train], [t.columns["question"] for t in tasks.held_out]


def test_embedded_tasks_hold_out_problems_of_their_own(prompter: Prompter) -> None:
    tasks = load_tasks(TasksConfig(limit=200), prompter, "gsm8k")
    train, held_out = questions(tasks)
    assert len(train) == 200 and len(held_out) == 512 and not tasks.dropped
    assert not set(train) & set(held_out)
    task = tasks.train[0]
    assert task.prompt_ids.dtype == "int32"
    assert task.prompt_ids.tolist() == prompter.prompt_ids(task.columns["question"])
    assert task.columns.keys() == {"question", "answer", "level", "solution"}
    assert int(task.columns["answer"]) >= 0


def test_embedded_levels_and_repetition(prompter: Prompter) -> None:
    config = TasksConfig(limit=50, levels=(2,))
    tasks = load_tasks(config, prompter, "gsm8k")
    assert {task.columns["level"] for task in (*tasks.train, *tasks.held_out)} == {"2"}
    assert questions(load_tasks(config, prompter, "gsm8k")) == questions(tasks)


@pytest.mark.parametrize(
    ("write", "name"), [(write_jsonl, "t.jsonl"), (write_csv, "t.csv"), (write_parquet, "t.parquet")]
)
def test_files_of_every_kind_give_the_same_tasks(
    write: Callable[[Path, Sequence[Row]], Path], name: str, tmp_path: Path, prompter: Prompter
) -> None:
    source = write(tmp_path / name, rows(20))
    tasks = load_tasks(TasksConfig(source=str(source)), prompter, "gsm8k")
    train, held_out = questions(tasks)
    assert (len(train), len(held_out)) == (18, 2)
    assert sorted(train + held_out) == sorted(row["question"] for row in rows(20))
    plain = load_tasks(TasksConfig(source=str(write_jsonl(tmp_path / "plain.jsonl", rows(20)))), prompter, "gsm8k")
    assert questions(plain) == (train, held_out)
    (third,) = (task for task in (*tasks.train, *tasks.held_out) if task.columns["answer"] == "4")
    as_text = {"question": "What is 3 + 1?", "answer": "4", "kind": "sum"}
    assert third.columns == as_text | {"unconverted": '{"answer": 4}'}
    assert third.prompt_ids.tolist() == prompter.prompt_ids("What is 3 + 1?")


def test_columns_of_other_names_get_the_canonical_ones(tmp_path: Path, prompter: Prompter) -> None:
    data = [{"problem": f"{n}?", "gold": n, "hint": None} for n in range(10)]
    source = write_jsonl(tmp_path / "t.jsonl", data)
    config = TasksConfig(source=str(source), question="problem", answer="gold", system_prompt="Be brief.")
    tasks = load_tasks(config, prompter, "gsm8k")
    (second,) = (task for task in (*tasks.train, *tasks.held_out) if task.columns["answer"] == "2")
    unconverted = '{"problem": "2?", "gold": 2, "hint": null}'
    assert second.columns == {"question": "2?", "answer": "2", "unconverted": unconverted}
    assert second.prompt_ids.tolist() == prompter.prompt_ids("2?", "Be brief.")


def test_a_question_with_a_system_message_keeps_it(tmp_path: Path, prompter: Prompter) -> None:
    asked = {"role": "user", "content": "2?"}
    data = [{"question": [{"role": "system", "content": "Be brief."}, asked]}, {"question": [asked]}]
    source = write_jsonl(tmp_path / "t.jsonl", data)
    config = TasksConfig(source=str(source), system_prompt="Be kind.")
    tasks = load_tasks(config, prompter, "callable")
    seen = sorted(task.prompt_ids.tolist() for task in tasks.train)
    assert seen == sorted(prompter.prompt_ids("2?", system) for system in ("Be brief.", "Be kind."))
    told = told_prompts(tasks.train, "Hint.", config, prompter, "callable").values()
    expected = sorted(prompter.prompt_ids("2?", f"{system}\nHint.") for system in ("Be brief.", "Be kind."))
    assert sorted(ids.tolist() for ids in told) == expected


def test_a_held_out_file_of_its_own(tmp_path: Path, prompter: Prompter) -> None:
    source = write_jsonl(tmp_path / "train.jsonl", rows(10))
    held_out = write_jsonl(tmp_path / "test.jsonl", rows(5, first=100))
    train, held_out_questions = questions(
        load_tasks(TasksConfig(source=str(source), held_out=str(held_out)), prompter, "gsm8k")
    )
    assert (len(train), len(held_out_questions)) == (10, 5)
    assert not set(train) & set(held_out_questions)


def test_the_limit_caps_training_and_not_what_is_held_out(tmp_path: Path, prompter: Prompter) -> None:
    source = write_jsonl(tmp_path / "t.jsonl", rows(40))
    limited = questions(load_tasks(TasksConfig(source=str(source), limit=7), prompter, "gsm8k"))
    unlimited = questions(load_tasks(TasksConfig(source=str(source), limit=0), prompter, "gsm8k"))
    assert (len(limited[0]), len(unlimited[0])) == (7, 36)
    assert limited[1] == unlimited[1] and len(limited[1]) == 4


def test_prompts_that_are_too_long_are_dropped_and_counted(tmp_path: Path, prompter: Prompter) -> None:
    data = rows(20)
    data[1]["question"] = "and so on " * 300
    source = write_jsonl(tmp_path / "t.jsonl", data)
    held_out = write_jsonl(tmp_path / "h.jsonl", [*rows(1, first=100), data[1]])
    tasks = load_tasks(TasksConfig(source=str(source), held_out=str(held_out)), prompter, "gsm8k")
    assert (len(tasks.train), len(tasks.held_out)) == (19, 1)
    assert tasks.dropped == {"with a prompt of more than tasks.max_prompt_tokens = 256": 2}
    assert max(len(task.prompt_ids) for task in tasks.train) <= 256


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"question": "problem"}, "no column 'problem'; it has question, answer, kind: set tasks.question/answer"),
        ({"answer": "gold"}, "no column 'gold'"),
        (
            {"max_prompt_tokens": 1},
            "no task to train on: 10 with a prompt of more than tasks.max_prompt_tokens = 1",
        ),
        ({"held_out": "nowhere.jsonl"}, "the file 'nowhere.jsonl', which does not exist"),
        ({"held_out": "test"}, r"'test' is not a .jsonl.* file, and tasks.source = '.*t.jsonl' has no splits"),
    ],
)
def test_what_does_not_fit_is_one_sentence(
    config: dict[str, Any], words: str, tmp_path: Path, prompter: Prompter
) -> None:
    source = write_jsonl(tmp_path / "t.jsonl", rows(10))
    with pytest.raises(DataError, match=words) as caught:
        load_tasks(TasksConfig(source=str(source), **config), prompter, "gsm8k")
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named(prompter: Prompter) -> None:
    with pytest.raises(DataError, match=r"the file 'missing\.csv', which does not exist"):
        load_tasks(TasksConfig(source="missing.csv"), prompter, "gsm8k")


def test_a_file_that_cannot_be_read_is_one_sentence(tmp_path: Path, prompter: Prompter) -> None:
    source = tmp_path / "t.parquet"
    source.write_bytes(b"not parquet")
    with pytest.raises(DataError, match=r"t\.parquet' cannot be read: ") as caught:
        load_tasks(TasksConfig(source=str(source)), prompter, "gsm8k")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("t.jsonl", "", "is empty; it needs a row with a question"),
        ("t.jsonl", '{"question": "1?", "answer": "1"}\n{"question": \n', "JSON parse error"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(tmp_path: Path, prompter: Prompter, name: str, text: str, says: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=says):
        load_tasks(TasksConfig(source=str(tmp_path / name)), prompter, "gsm8k")


def test_what_can_be_no_task_is_dropped_and_counted_by_reason(tmp_path: Path, prompter: Prompter) -> None:
    data = rows(20)
    data[0]["question"], data[1]["answer"], data[2]["answer"] = "  ", "none", "3 or 4"
    data[3]["note"] = "x" * 70_000
    source = write_jsonl(tmp_path / "t.jsonl", [row | {"answer": str(row["answer"])} for row in data])
    tasks = load_tasks(TasksConfig(source=str(source)), prompter, "gsm8k")
    assert len(tasks.train) + len(tasks.held_out) == 16 and sum(tasks.dropped.values()) == 4
    assert tasks.dropped == {
        "without a question": 1,
        "with a gold answer that verifier.kind = 'gsm8k' cannot read": 2,
        "with more than 64 columns or a column of more than 65536 characters": 1,
    }


def test_tasks_of_a_survey_can_be_ordered(tmp_path: Path, prompter: Prompter) -> None:
    data = [row | {"How content are you, all in all? " * 5: "very"} for row in rows(10)]
    tasks = load_tasks(TasksConfig(source=str(write_csv(tmp_path / "t.csv", data))), prompter, "gsm8k")
    (order,) = build_orders(
        tasks.train,
        seed=0,
        lane="train",
        step=0,
        first_slot=0,
        samples=2,
        version=0,
        sampling=Sampling(temperature=1.0, max_new_tokens=4),
        groups_per_order=0,
    )
    assert encode(order) and len(order.groups) == 9


@pytest.mark.parametrize(
    ("kind", "answer", "readable"),
    [
        ("gsm8k", "1,234", True),
        ("gsm8k", "so\n#### 18", True),
        ("gsm8k", "\\frac12", False),
        ("exact", "18 or 19", False),
        ("math", "\\frac12", True),
        ("math", "\\frac{1}{2", False),
        ("math", " ", False),
        ("math", "x" * 501, False),
        ("callable", "", True),
    ],
)
def test_which_gold_answers_can_be_read(kind: VerifierKind, answer: str, readable: bool) -> None:
    assert is_readable(answer, kind) is readable


def test_a_users_function_needs_no_answer(tmp_path: Path, prompter: Prompter) -> None:
    source = write_jsonl(tmp_path / "t.jsonl", [{"question": f"{n}?"} for n in range(10)])
    tasks = load_tasks(TasksConfig(source=str(source)), prompter, "callable")
    assert tasks.train[0].columns.keys() == {"question"}
    with pytest.raises(DataError, match="no column 'answer'"):
        load_tasks(TasksConfig(source=str(source), few_shot=1), prompter, "callable")


@pytest.mark.parametrize(("lacking", "what"), [({"answer": None}, "answer"), ({"question": " "}, "question")])
def test_an_example_without_its_answer_is_refused_in_words(
    lacking: Row, what: str, tmp_path: Path, prompter: Prompter
) -> None:
    first, second, *others = rows(20)
    source = write_jsonl(tmp_path / "t.jsonl", [first, second | lacking, *others])
    with pytest.raises(
        DataError, match=rf"^tasks\.few_shot = 3 .* row 2 has no {what}; put whole rows first, or set a"
    ):
        load_tasks(TasksConfig(source=str(source), few_shot=3), prompter, "gsm8k")
    shown = load_tasks(TasksConfig(source=str(source), few_shot=1), prompter, "gsm8k")
    assert len(shown.train) + len(shown.held_out) == 18


@pytest.mark.parametrize("role", ["question", "answer", "subject"])
def test_the_level_may_be_a_column_with_another_role(role: str, tmp_path: Path, prompter: Prompter) -> None:
    data = [{"question": f"{n}?", "answer": n, "subject": "sum"} for n in range(10)]
    source = str(write_jsonl(tmp_path / "t.jsonl", data))
    tasks = load_tasks(TasksConfig(source=source, level=role), prompter, "gsm8k")
    (second,) = (task for task in (*tasks.train, *tasks.held_out) if task.columns["answer"] == "2")
    assert second.columns.items() >= {"question": "2?", "answer": "2", "subject": "sum"}.items()
    assert second.columns["level"] == second.columns[role]


def test_a_seed_gives_another_order_and_always_the_same(tmp_path: Path, prompter: Prompter) -> None:
    source = write_jsonl(tmp_path / "t.jsonl", rows(50))
    plain, mixed, again = (
        questions(load_tasks(TasksConfig(source=str(source), seed=seed), prompter, "gsm8k")) for seed in (0, 5, 5)
    )
    assert mixed == again != plain
    assert sorted(mixed[0] + mixed[1]) == sorted(plain[0] + plain[1])


@pytest.mark.parametrize("seed", [0, 1])
def test_of_a_sorted_file_every_part_is_a_sample(seed: int, tmp_path: Path, prompter: Prompter) -> None:
    """1000 rows by difficulty: what the limit takes, what is held out, and the first of the test set are from all."""
    source = write_jsonl(tmp_path / "t.jsonl", rows(1000))
    test = write_jsonl(tmp_path / "s.jsonl", rows(1000))
    config = TasksConfig(source=str(source), test=str(test), limit=100, seed=seed)
    tasks, (tested, _) = load_tasks(config, prompter, "gsm8k"), load_test(config, prompter, "gsm8k")
    for part in (tasks.train, tasks.held_out, tested[:100]):
        answers = sorted(int(task.columns["answer"]) for task in part)
        assert len(answers) == 100
        assert 400 < answers[50] < 600 and answers[0] < 100 and answers[-1] > 900


def test_no_copy_of_a_held_out_question_is_trained_on(tmp_path: Path, prompter: Prompter) -> None:
    data = [*rows(40), *(row | {"question": row["question"].replace(" ", "  ")} for row in rows(40))]
    train, held_out = questions(
        load_tasks(TasksConfig(source=str(write_jsonl(tmp_path / "t.jsonl", data))), prompter, "gsm8k")
    )
    assert not {" ".join(q.split()) for q in train} & {" ".join(q.split()) for q in held_out}
    assert 8 <= len(held_out) <= 16 and len(train) + len(held_out) == 80


def test_training_does_not_read_the_test_set(tmp_path: Path, prompter: Prompter) -> None:
    write_jsonl(tmp_path / "train.jsonl", rows(40))
    (tmp_path / "test.jsonl").write_text("not JSON")
    config = TasksConfig(source=str(tmp_path), few_shot=1)
    assert len(load_tasks(config, prompter, "gsm8k").held_out) == 3
    with pytest.raises(DataError, match="cannot be read"):
        load_test(config, prompter, "gsm8k")
    write_jsonl(tmp_path / "test.jsonl", [*rows(5, first=100), {"question": " ", "answer": 1, "kind": ""}])
    tested, dropped = load_test(config, prompter, "gsm8k")
    assert sorted(int(task.columns["answer"]) for task in tested) == [101, 102, 103, 104, 105]
    assert dropped == {"without a question": 1}
    assert "What is 0 + 1?" in prompter.as_the_model_sees(tested[0].prompt_ids.tolist())
    assert load_test(TasksConfig(), prompter, "gsm8k") == ((), {})


def test_examples_are_turns_before_every_question_and_not_trained_on(tmp_path: Path, prompter: Prompter) -> None:
    data = [{"question": f"{n}?", "answer": f"It is <<{n}={n}>>{n}.\n#### {n}"} for n in range(20)]
    source = write_jsonl(tmp_path / "t.jsonl", data)
    config = TasksConfig(source=str(source), few_shot=2, limit=5, system_prompt="S")
    tasks = load_tasks(config, prompter, "gsm8k")
    train, held_out = questions(tasks)
    assert (len(train), len(held_out)) == (5, 1)
    assert not {"0?", "1?"} & {*train, *held_out}
    messages = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "0?"},
        {"role": "assistant", "content": "It is 0.\n#### 0"},
        {"role": "user", "content": "1?"},
        {"role": "assistant", "content": "It is 1.\n#### 1"},
        {"role": "user", "content": held_out[0]},
    ]
    wanted = prompter.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert prompter.as_the_model_sees(tasks.held_out[0].prompt_ids.tolist()) == wanted
    assert [f"{task.columns['answer']}?" for task in tasks.train] == train


def test_copies_of_an_example_are_neither_trained_on_nor_evaluated(tmp_path: Path, prompter: Prompter) -> None:
    data = [row | {"kind": str(copy)} for row in rows(20) for copy in range(4)]
    data[2]["question"] = data[2]["question"].replace(" ", "  ")
    source, own = (str(write_jsonl(tmp_path / name, made)) for name, made in (("t.jsonl", data), ("h.jsonl", rows(5))))
    reason = "with the question and answer of an example"
    for named, copies, tested in (("", 2, 4), (own, 3, 4)):
        tasks = load_tasks(TasksConfig(source=source, few_shot=2, held_out=named), prompter, "gsm8k")
        assert "What is 0 + 1?" not in {" ".join(q.split()) for q in (*questions(tasks)[0], *questions(tasks)[1])}
        assert len(tasks.held_out) == tested and tasks.dropped == {reason: copies}
    found, dropped = load_test(TasksConfig(source=source, few_shot=2, test=own), prompter, "gsm8k")
    assert len(found) == 4 and dropped == {reason: 1}


def test_rows_like_the_example_stay_if_all_are_or_with_another_answer(tmp_path: Path, prompter: Prompter) -> None:
    copies = [rows(1)[0] | {"kind": str(copy)} for copy in range(21)]
    for data, counts in ((copies, (18, 2)), ([*copies, copies[0] | {"answer": 7}], (1, 0))):
        source = str(write_jsonl(tmp_path / f"{len(data)}.jsonl", data))
        tasks = load_tasks(TasksConfig(source=source, few_shot=1), prompter, "gsm8k")
        assert (len(tasks.train), len(tasks.held_out)) == counts


def test_examples_of_the_embedded_source_are_worked_out(prompter: Prompter) -> None:
    tasks = load_tasks(TasksConfig(levels=(2,), limit=8, few_shot=1), prompter, "gsm8k")
    prompt = prompter.as_the_model_sees(tasks.train[0].prompt_ids.tolist())
    shown, _, asked = prompt.rpartition(tasks.train[0].columns["question"])
    assert re.search(r"How .*\?.*\d+ [+*-] \d+ = \d+\n\d+ [+*-] \d+ = \d+\n#### \d+", shown, re.DOTALL)
    assert "####" not in asked


def test_generated_tasks_can_be_evaluated_on_a_file(tmp_path: Path, prompter: Prompter) -> None:
    held_out = write_jsonl(tmp_path / "h.jsonl", rows(5, first=100))
    train, found = questions(load_tasks(TasksConfig(limit=20, held_out=str(held_out)), prompter, "gsm8k"))
    assert len(train) == 20 and sorted(found) == sorted(row["question"] for row in rows(5, first=100))
    with pytest.raises(DataError, match=r"'test' is not a .* file, and tasks\.source = 'embedded' has no splits"):
        load_tasks(TasksConfig(held_out="test"), prompter, "gsm8k")


@pytest.mark.parametrize(
    ("different", "copies", "held_out"),
    [(20, 50, 100), (25, 40, 80), (3, 10, 10), (1, 40, 4), (1, 9, 0), (95, 1, 9), (9, 1, 0)],
)
def test_a_tenth_of_the_questions_is_held_out_however_often_they_occur(
    different: int, copies: int, held_out: int, tmp_path: Path, prompter: Prompter
) -> None:
    data = [row | {"secret": copy} for copy in range(copies) for row in rows(different)]
    source = write_jsonl(tmp_path / "t.jsonl", data)
    train, kept_back = questions(load_tasks(TasksConfig(source=str(source)), prompter, "gsm8k"))
    assert (len(train), len(kept_back)) == (len(data) - held_out, held_out)
    assert different == 1 or not set(train) & set(kept_back)


def test_the_last_rows_are_held_out_where_no_question_repeats() -> None:
    data = [{"question": f"{n}?"} for n in range(38)]
    assert divided(data) == (data[:35], data[35:])
