"""Named data sets, folders of splits, and how rows become canonical."""

import json
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from actor.verifiers.reward_arguments import as_in_the_data
from learner.tasks.sources import (
    KNOWN,
    as_configured,
    canonical,
    held_out_rows,
    local_files,
    place_of,
    place_of_test,
    rows_of_test,
    training_rows,
)
from learner.tasks.tasks import Task, missing_answers
from shared.config.data import SYSTEM, UNCONVERTED, TasksConfig
from shared.errors import DataError

DATA = Path(__file__).resolve().parents[4] / "shared" / "data"
NAMES = {"question": "question", "answer": "answer", "level": "level", "subject": "subject"}


pytestmark = pytest.mark.usefixtures("own_cache")


def folder(path: Path, **splits: Sequence[dict[str, Any]]) -> Path:
    path.mkdir()
    for split, rows in splits.items():
        (path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def row(n: int) -> dict[str, Any]:
    return {"question": f"{n}?", "answer": str(n)}


def test_a_folder_has_a_file_a_split_and_its_test_file_is_not_read_in_training(tmp_path: Path) -> None:
    source = str(folder(tmp_path / "mine [1]", train=[row(1)], test=[row(2)], other=[row(3)]))
    config = TasksConfig(source=source)
    assert training_rows(config, needs_answer=True) == [row(1)]
    assert held_out_rows(config, needs_answer=True) is None
    assert rows_of_test(config, needs_answer=True) == [row(2)]
    assert rows_of_test(TasksConfig(source=source, test="other"), needs_answer=True) == [row(3)]
    assert rows_of_test(TasksConfig(source=source, split="test"), needs_answer=True) is None
    assert held_out_rows(TasksConfig(source=source, held_out="test"), needs_answer=True) == [row(2)]
    assert training_rows(TasksConfig(source=source, split="other"), needs_answer=True) == [row(3)]
    assert held_out_rows(TasksConfig(source=source, held_out="other"), needs_answer=True) == [row(3)]
    with pytest.raises(DataError, match=r"holds no validation.jsonl"):
        training_rows(TasksConfig(source=source, split="validation"), needs_answer=True)


def test_a_folder_without_a_test_file_has_no_test_set(tmp_path: Path) -> None:
    source = str(folder(tmp_path / "mine", train=[row(1)]))
    assert rows_of_test(TasksConfig(source=source), needs_answer=True) is None


def test_a_folder_may_be_as_the_hub_has_it(tmp_path: Path) -> None:
    """A split of it is in parts."""
    from datasets import Dataset, disable_progress_bars

    disable_progress_bars()
    for place in (tmp_path / "flat", tmp_path / "deep" / "data"):
        place.mkdir(parents=True)
        for part, first in (("train-00000-of-00002", 1), ("train-00001-of-00002", 2), ("test-00000-of-00001", 3)):
            Dataset.from_list([row(first)]).to_parquet(place / f"{part}.parquet")
    for name in ("flat", "deep"):
        config = TasksConfig(source=str(tmp_path / name))
        assert training_rows(config, needs_answer=True) == [row(1), row(2)]
        assert rows_of_test(config, needs_answer=True) == [row(3)]
    saved = tmp_path / "saved"
    Dataset.from_list([row(1)]).save_to_disk(saved)
    with pytest.raises(DataError, match=r"holds no train\.jsonl .*; set tasks\.split, or write .* as train\.parquet"):
        training_rows(TasksConfig(source=str(saved)), needs_answer=True)


def test_a_file_may_be_in_the_home_folder_and_end_in_capitals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "MINE.JSONL").write_text(json.dumps(row(1)))
    folder(tmp_path / "mine", train=[row(2)], test=[row(3)])
    file = TasksConfig(source="~/MINE.JSONL", held_out="~/mine")
    assert training_rows(file, needs_answer=True) == [row(1)]
    assert held_out_rows(file, needs_answer=True) == [row(3)]
    assert training_rows(TasksConfig(source="~/mine"), needs_answer=True) == [row(2)]


def test_a_file_of_another_kind_is_not_looked_for_on_the_hub(tmp_path: Path) -> None:
    (tmp_path / "t.tsv").write_text("question\tanswer\n")
    with pytest.raises(DataError, match=r"the file '.*t\.tsv', expected one that ends in \.jsonl, .*; write the rows"):
        training_rows(TasksConfig(source=str(tmp_path / "t.tsv")), needs_answer=True)


@pytest.mark.parametrize("name", ["qa.txt", "qa.jsonl.gz", "sheet.XLSX"])
def test_a_name_with_another_suffix_is_no_id_of_the_hub(name: str) -> None:
    with pytest.raises(
        DataError, match=rf"^tasks\.held_out names the file '{name}', expected one that ends in \.jsonl"
    ):
        local_files("tasks.held_out", name, "train")
    for id in ("squad", "owner/name.v2", "owner/wiki.txt", "buckets/owner/name/set", "wikitext-2.1"):
        assert local_files("tasks.source", id, "train") == []


@pytest.mark.parametrize("name", ["./nowhere", "/no/where", "~/nowhere", "../no where"])
def test_a_path_is_no_id_of_the_hub(name: str) -> None:
    with pytest.raises(
        DataError, match=rf"^sft\.source names the folder '{name}', which does not exist; .* begins in /"
    ):
        local_files("sft.source", name, "train")


def test_an_answer_that_is_named_must_be_there_also_if_nobody_needs_it(tmp_path: Path) -> None:
    source = str(tmp_path / "t.jsonl")
    Path(source).write_text('{"question": "1?", "gold": null}\n{"question": "2?", "gold": "2"}\n')
    with pytest.raises(DataError, match=r"has no column 'solutoin'; it has question, gold: set tasks.question/answer"):
        training_rows(TasksConfig(source=source, answer="solutoin"), needs_answer=False)
    found = training_rows(TasksConfig(source=source, answer="gold"), needs_answer=False)
    assert [row.get("answer") for row in found] == [None, "2"]
    assert len(training_rows(TasksConfig(source=source), needs_answer=False)) == 2


def test_only_some_of_many_columns_are_named(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text(json.dumps({str(n): row(n) for n in range(80)}))
    with pytest.raises(DataError, match=r"it has 0, 1, 2, .*, 14, 15 and 64 more: set tasks"):
        training_rows(TasksConfig(source=str(tmp_path / "t.json")), needs_answer=True)


def test_own_names_of_columns_are_not_those_of_a_known_set(tmp_path: Path) -> None:
    mine = str(folder(tmp_path / "mine", train=[{"ask": "1?", "gold": "1"}], test=[{"ask": "2?", "gold": "2"}]))
    known = str(folder(tmp_path / "math500", test=[{"problem": "3?", "answer": "3"}]))
    own = TasksConfig(source=mine, question="ask", answer="gold", subset="hard", test=known, held_out=known)
    assert [row["question"] for row in training_rows(own, needs_answer=True)] == ["1?"]
    for read in (rows_of_test, held_out_rows):
        assert [row["question"] for row in read(own, needs_answer=True) or ()] == ["3?"]
    assert (as_configured(mine, own).subset, as_configured("gsm8k", own).subset) == ("hard", "main")
    # Another file has the same columns, or is told so.
    beside = str(folder(tmp_path / "other", test=[{"ask": "4?", "gold": "4"}], train=[row(5)]))
    assert [row["question"] for row in rows_of_test(structs.replace(own, test=beside), needs_answer=True) or ()] == [
        "4?"
    ]
    with pytest.raises(
        DataError, match=r"tasks\.test = '.*' has no column 'ask'; it has question, answer: name them as"
    ):
        rows_of_test(structs.replace(own, test=f"{beside}/train.jsonl"), needs_answer=True)


def test_a_folder_called_like_a_known_set_has_its_columns(tmp_path: Path) -> None:
    rows = [{"problem": "1?", "solution": "So \\boxed{1}.", "answer": "1", "subject": "Algebra", "level": 2}]
    source = str(folder(tmp_path / "math500", test=rows))
    config = TasksConfig(source=source)
    as_text = {"question": "1?", "solution": "So \\boxed{1}.", "answer": "1", "subject": "Algebra", "level": "2"}
    as_read = {UNCONVERTED: '{"problem": "1?", "level": 2}'}
    assert training_rows(config, needs_answer=True) == [as_text | as_read]
    assert place_of_test(config) is None
    mine = TasksConfig(source=str(folder(tmp_path / "mine", train=[row(1)])), held_out=source)
    assert held_out_rows(mine, needs_answer=True) == training_rows(config, needs_answer=True)


@pytest.mark.parametrize(
    ("source", "test", "place"),
    [
        ("gsm8k", "", ("gsm8k", "test")),
        ("math", "", ("math", "test")),
        ("math", "math500", ("math500", "test")),
        ("math500", "", None),
        ("embedded", "", None),
        ("embedded", "my.csv", ("my.csv", "")),
        ("somebody/something", "", None),
        ("somebody/something", "validation", ("somebody/something", "validation")),
        ("gsm8k", "my.csv", ("my.csv", "")),
    ],
)
def test_what_is_the_test_set(source: str, test: str, place: tuple[str, str] | None) -> None:
    assert place_of_test(TasksConfig(source=source, test=test)) == place
    # The same words mean the same for tasks.held_out; but nothing is held out of a test set unless it is asked for.
    assert held_out_rows(TasksConfig(source=source), needs_answer=True) is None
    assert not test or place_of("held_out", test, source) == place


@pytest.mark.parametrize("name", sorted(KNOWN))
def test_a_known_name_means_the_hub_and_says_what_to_do_without_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets.config
    import huggingface_hub.constants

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        DataError, match=KNOWN[name].hub + r".* \(a machine without the hub can read a folder"
    ) as caught:
        training_rows(TasksConfig(source=name), needs_answer=True)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "columns"),
    [
        ({"answer": 18}, {"answer": "18"}),
        (
            {"answer": "9+9=<<9+9=18>>18\n#### 1,018"},
            {"answer": "1,018", "solution": "9+9=18\n#### 1,018", "level": "1"},
        ),
        ({"answer": "<<1+1=2>>2, <<2+1=3>>3\n#### 3"}, {"level": "2"}),
        ({"answer": "<<1+1=2>>2, <<2+1=3>>3\n#### 3", "level": "hard"}, {"level": "hard"}),
        ({"answer": "So \\boxed{1}, no, \\boxed{\\frac{1}{2}}."}, {"answer": "\\frac{1}{2}"}),
        ({"answer": "a #### 3", "solution": "mine"}, {"answer": "3", "solution": "mine"}),
        ({"answer": "1", "level": "Level 5"}, {"level": "5"}),
        ({"answer": "1", "level": 3, "type": "x"}, {"level": "3", "type": "x"}),
        ({"answer": None}, {}),
    ],
)
def test_canonical_columns(given: dict[str, Any], columns: dict[str, str]) -> None:
    found = canonical({"question": "?", **given}, NAMES)
    assert found.items() >= {"question": "?", **columns}.items()
    assert None not in found.values() and ("level" in found) == ("level" in columns)


def test_columns_of_other_names() -> None:
    names = {"question": "q", "answer": "a", "level": "grade", "subject": "type"}
    assert canonical({"q": 1, "a": 2, "grade": 3, "type": 4, "more": 5}, names) == {
        "question": "1",
        "answer": "2",
        "level": "3",
        "subject": "4",
        "more": "5",
        UNCONVERTED: '{"q": 1, "a": 2, "grade": 3, "type": 4, "more": 5}',
    }


def test_a_configured_column_wins_over_one_that_has_its_canonical_name() -> None:
    """In any order of the columns; a function reads both, under the names of the data."""
    names = {"question": "problem", "answer": "gold", "level": "grade", "subject": "type"}
    ours = {"problem": "?", "gold": "5", "grade": "1", "type": "sum"}
    others = {"question": "Other?", "answer": "long text 7", "level": "9", "subject": "story"}
    for row in (ours | others, others | ours):
        found = canonical(row, names)
        assert json.loads(found.pop(UNCONVERTED)) == ours | others
        assert found == {"question": "?", "answer": "5", "level": "1", "subject": "sum"}
    assert "answer" not in canonical({"problem": "?", "gold": None, "answer": "7"}, names)
    assert json.loads(canonical(ours | {"answer": None}, names)[UNCONVERTED])["answer"] is None
    assert canonical({"problem": "?", "answer": "7"}, names)["answer"] == "7", "the data has no column `gold`"


def test_a_function_can_read_the_row_as_it_is_in_the_data() -> None:
    """Text under its own name is there already, what JSON cannot hold stays text."""
    day = date(2026, 1, 2)
    names = {"question": "problem", "answer": "answer", "level": "level", "subject": "subject"}
    row = {"problem": "?", "answer": "18", "nums": [1, 2], "gold": None, "day": day, "deep": {"a": True}}
    found = canonical(row, names)
    assert found == {
        "question": "?",
        "answer": "18",
        "nums": "[1, 2]",
        "day": "2026-01-02",
        "deep": "{'a': True}",
        UNCONVERTED: '{"problem": "?", "nums": [1, 2], "gold": null, "deep": {"a": true}}',
    }
    assert UNCONVERTED not in canonical({"question": "?", "answer": "18"}, NAMES)


@pytest.mark.parametrize(
    ("row", "gold"),
    [
        ({"answer": "9+9=<<9+9=18>>18\n#### 18"}, "18"),
        ({"answer": "So \\boxed{\\frac{1}{2}}.", "solution": "mine", "level": "Level 5"}, "\\frac{1}{2}"),
        ({"answer": "7", "level": "2"}, "7"),
        ({"answer": 7}, "7"),
    ],
)
def test_a_function_reads_each_column_whole_and_the_gold_answer_beside_it(row: dict[str, Any], gold: str) -> None:
    found = canonical({"question": "?", **row}, NAMES)
    assert found["answer"] == gold
    assert as_in_the_data(found).items() >= {"question": "?", **row, "gold_answer": gold}.items()
    mine = canonical({"question": "?", **row, "gold_answer": "my own"}, NAMES)
    assert as_in_the_data(mine)["gold_answer"] == "my own"


@pytest.mark.parametrize("column", ["answer", "gold"])
def test_a_function_gets_the_nulls_of_a_row(column: str) -> None:
    """With several kinds of tasks in a data set, a row has only the columns of its own."""
    row = {"question": "?", column: None, "tests": ["a"]}
    found = canonical(row, NAMES | {"answer": column})
    assert found.keys() == {"question", "tests", UNCONVERTED}
    assert as_in_the_data(found) == {"answer": None, "gold_answer": None} | row
    mine = canonical(row | {"answer": "7"}, NAMES | {"answer": "gold"})
    assert column == "answer" or as_in_the_data(mine) == {"gold_answer": None, "answer": "7"} | row


@pytest.mark.parametrize(("row", "missing"), [({"answer": None, "gold": "1"}, 0), ({"answer": "1", "gold": None}, 1)])
def test_an_answer_that_is_missing_is_that_of_the_column_in_use(row: dict[str, Any], missing: int) -> None:
    columns = canonical({"question": "?"} | row, NAMES | {"answer": "gold"})
    words = missing_answers([Task(prompt_ids=np.zeros(1, np.int32), columns=columns)])
    assert words.startswith("1 of 1 tasks have no answer") if missing else not words


SYSTEM_MESSAGE = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "2?"}


def test_a_question_may_be_a_chat() -> None:
    names = NAMES | {"question": "prompt"}
    row = {"prompt": [SYSTEM_MESSAGE, USER], "answer": "2", SYSTEM: "of the data"}
    found = canonical(row, names)
    assert (found["question"], found[SYSTEM]) == ("2?", "Be brief.")
    assert as_in_the_data(found) == {"question": "2?", "gold_answer": "2"} | row
    for asked in ([USER], "2?"):
        found = canonical(row | {"prompt": asked}, names)
        assert found["question"] == "2?" and SYSTEM not in found, "one of the data's own is no system message"
        assert as_in_the_data(found)[SYSTEM] == "of the data"


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ([USER, {"role": "assistant", "content": "2"}], "chat of the messages user, assistant, expected one that ends"),
        ([USER, SYSTEM_MESSAGE, USER], "chat of the messages user, system, user, expected .* a system message at its"),
        ([SYSTEM_MESSAGE], "chat of the messages system, expected one that ends in a message of the user"),
        ([], "chat of the messages none"),
        (["2?"], "2.*, expected text or a list of messages with a role"),
        ({"text": "2?"}, "expected text or a list of messages with a role"),
        ([{"role": "user", "content": [{"type": "image"}]}], "and content as text; correct that row"),
    ],
)
def test_another_chat_is_refused(asked: object, says: str) -> None:
    with pytest.raises(DataError, match="^The column 'prompt' has .*" + says):
        canonical({"prompt": asked}, NAMES | {"question": "prompt"})


def test_an_answer_of_several_values_is_only_for_functions(tmp_path: Path) -> None:
    source = str(folder(tmp_path / "mine", train=[{"question": "1?", "answer": {"value": 1}}]))
    with pytest.raises(DataError, match=r"The column 'answer' has .*'value': 1.*expected an answer as text or a num"):
        training_rows(TasksConfig(source=source), needs_answer=True)
    (found,) = training_rows(TasksConfig(source=source), needs_answer=False)
    assert as_in_the_data(found)["answer"] == {"value": 1}


class Picture:
    """Its text has its address."""


def test_numbers_are_written_as_people_write_them(tmp_path: Path) -> None:
    """One missing cell makes a CSV column of whole numbers one of floats."""
    (tmp_path / "t.csv").write_text("question,answer\na,1\nb,\nc,3\n")
    found = training_rows(TasksConfig(source=str(tmp_path / "t.csv")), needs_answer=True)
    assert [row.get("answer") for row in found] == ["1", None, "3"]
    values = (1e-05, 1e16, 0.1, -2.0, 123456789012345678.0, float("inf"))
    texts = ["0.00001", "10000000000000000", "0.1", "-2", "123456789012345680", "inf"]
    assert [canonical({"question": "?", "answer": value}, NAMES)["answer"] for value in values] == texts


def test_a_value_has_the_same_text_in_each_process() -> None:
    one, other = (canonical({"question": "?", "answer": "18", "image": Picture()}, NAMES) for _ in range(2))
    assert one == other and "Picture object" in one["image"]


def test_a_solution_in_another_script_takes_no_more_characters_for_functions() -> None:
    solution = "\u7b54" * 11_000 + " #### 18"
    found = canonical({"question": "?", "answer": solution}, NAMES)
    assert json.loads(found[UNCONVERTED])["answer"] == solution and len(found[UNCONVERTED]) < 12_000


def test_a_column_whose_name_the_wire_does_not_take_is_only_for_functions() -> None:
    """A survey's columns are named by whole questions."""
    longest, longer = "n" * 128, "n" * 129
    row = {"question": "?", "answer": "18", longest: "a", longer: "b", "": 7}
    found = canonical(row, NAMES)
    as_text = {"question": "?", "answer": "18", longest: "a"}
    assert found == as_text | {UNCONVERTED: json.dumps({longer: "b", "": 7})}
    assert as_in_the_data(found) == row | {"gold_answer": "18"}
    assert canonical({longer: "?", "answer": "18"}, NAMES | {"question": longer})["question"] == "?"


@pytest.mark.skipif(not DATA.is_dir(), reason="needs the folder shared/data beside the repository, not part of it")
def test_the_published_files_are_read_whole() -> None:
    gsm8k = TasksConfig(source=str(DATA / "gsm8k"))
    train, test = training_rows(gsm8k, needs_answer=True), rows_of_test(gsm8k, needs_answer=True)
    assert test is not None and (len(train), len(test)) == (7473, 1319)
    assert train[0]["answer"] == "72" and "<<" not in train[0]["solution"]
    math500 = training_rows(TasksConfig(source=str(DATA / "math500")), needs_answer=True)
    assert len(math500) == 500 and {row["level"] for row in math500} == {"1", "2", "3", "4", "5"}
    assert len({row["subject"] for row in math500}) == 7
