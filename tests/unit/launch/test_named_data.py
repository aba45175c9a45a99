"""What is seen of a run's data before anything starts."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from launch.presets.load import check_data, check_tasks
from learner.tasks.sources import FIRST_BYTES, column_names
from shared.config.data import SftConfig, TasksConfig
from shared.errors import DataError

COLUMNS = ["question", "answer"]
LINES = b'{"question": "1?"}\n\n{"question": "2?", "answer": null}\n'


@pytest.mark.parametrize(
    ("name", "content", "columns"),
    [
        ("a.jsonl", LINES, COLUMNS),
        ("a.json", b' [{"question": "1?"},\n {"answer": 1}]', COLUMNS),
        ("a.json", b'{"question": "1?",\n "answer": 1}', []),
        ("a.jsonl", b'["question", "answer"]\n[1, 2]\n', []),
        ("a.jsonl", b'{"question": "1?"}\nquestion\n', []),
        ("a.jsonl", b"1\n", []),
        ("a.csv", b'\xef\xbb\xbf\nquestion,answer,\n1,"2\n",\n', [*COLUMNS, "Unnamed: 2"]),
        ("a.parquet", b"PAR1", []),
    ],
)
def test_columns_are_read_without_the_library(name: str, content: bytes, columns: list[str], tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    assert column_names(tmp_path / name) == columns


def test_columns_are_those_of_the_beginning_of_a_large_file(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"question": "1?"}\n' * (FIRST_BYTES // 18) + b'{"answer": "2"}\n' * 2)
    assert column_names(tmp_path / "a.jsonl") == ["question"]


def checked(config: TasksConfig, sft: SftConfig | None = None, *, evaluated: bool = True) -> None:
    check_data(config, sft or SftConfig(), "gsm8k", warm=sft is not None, evaluated=evaluated)


def written(file: Path, *rows: dict[str, Any]) -> str:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


ROW = {"question": "1?", "answer": "1"}


def test_data_that_can_be_read_or_may_be_on_the_hub_are_not_refused(tmp_path: Path) -> None:
    source = written(tmp_path / "train.jsonl", ROW)
    for config in (
        TasksConfig(source=source, held_out=source, test="missing.csv"),
        TasksConfig(source=str(tmp_path)),
        TasksConfig(source="numbers", question="never read"),
        TasksConfig(source="owner/name", held_out="validation", answer="solution"),
        TasksConfig(source="gsm8k"),
    ):
        checked(config)
    no_answer = TasksConfig(source=written(tmp_path / "q.jsonl", {"question": "1?"}))
    check_tasks(no_answer, "callable")
    with pytest.raises(DataError, match="no column 'answer'"):
        checked(no_answer)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"source": "missing.jsonl"}, "^tasks.source names the file 'missing.jsonl', which does not exist"),
        ({"source": "EMPTY"}, "^tasks.source = '.*': .*/empty.jsonl is empty"),
        ({"split": "other", "source": "FOLDER"}, "^tasks.source: the folder '.*' holds no other.jsonl"),
        ({"question": "ask"}, "^tasks.source = '.*' has no column 'ask'; it has question, answer: set tasks.question"),
        ({"held_out": "QUESTIONS"}, "^tasks.held_out = '.*' has no column 'answer'.* name them as in tasks.source"),
        ({"held_out": "test"}, "^tasks.held_out = 'test' is not a .jsonl"),
    ],
)
def test_data_that_a_run_cannot_use_are_refused(keys: dict[str, str], words: str, tmp_path: Path) -> None:
    source = written(tmp_path / "train.jsonl", ROW)
    places = {
        "EMPTY": written(tmp_path / "empty.jsonl"),
        "QUESTIONS": written(tmp_path / "q.jsonl", {"question": "1?"}),
        "FOLDER": str(tmp_path),
    }
    given = {key: places.get(value, value) for key, value in keys.items()}
    with pytest.raises(DataError, match=words):
        checked(structs.replace(TasksConfig(source=source), **given))


def test_the_test_set_is_looked_at_where_it_is_asked_for(tmp_path: Path) -> None:
    config = TasksConfig(source=written(tmp_path / "train.jsonl", ROW), test="missing.csv")
    check_tasks(config, "gsm8k")
    with pytest.raises(DataError, match=r"^tasks\.test names the file 'missing\.csv'"):
        check_tasks(config, "gsm8k", tested=True)


def test_a_warm_start_needs_tasks_only_to_evaluate(tmp_path: Path) -> None:
    missing = TasksConfig(source="missing.jsonl")
    for row in ({"messages": []}, {"question": "1?", "solution": "1"}):
        sft = SftConfig(source=written(tmp_path / "sft.jsonl", row))
        checked(missing, sft, evaluated=False)
        with pytest.raises(DataError, match=r"^tasks\.source names"):
            checked(missing, sft)
    with pytest.raises(DataError, match=r"^tasks\.source names"):
        checked(missing, SftConfig(), evaluated=False)
    with pytest.raises(DataError, match=r"^sft\.source = '.*' has neither the column 'messages' nor 'question' and"):
        checked(TasksConfig(), SftConfig(source=written(tmp_path / "other.jsonl", ROW)))
    with pytest.raises(DataError, match=r"^sft\.source names the file 'gone\.jsonl', which does not exist"):
        checked(TasksConfig(), SftConfig(source="gone.jsonl"))


QUICK = """
import sys
from launch.__main__ import main
codes = [main(["run", "embedded", "--dry-run", *words.split()]) for words in sys.argv[1:]]
heavy = {"torch", "transformers", "datasets"} & set(sys.modules)
assert not heavy, heavy
print(codes)
"""


def test_a_dry_run_finds_what_cannot_start_and_loads_no_library(tmp_path: Path) -> None:
    good = f"--set tasks.source={written(tmp_path / 'train.jsonl', ROW)}"
    faults = (
        "--set tasks.source=missing.jsonl",
        f"{good} --set tasks.question=ask",
        '--set lora.targets=["q_projj"]',
        "--set model.path=/no/where",
        "--set model.path=models/of/mine",
        "--set model.path=missing.gguf",
    )
    argv = [sys.executable, "-c", QUICK, good, *faults]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == str([0] + [2] * len(faults))
    for words in (
        "tasks.source names the file 'missing.jsonl', which does not exist",
        "has no column 'ask'",
        "lora.targets names 'q_projj', which this model does not have; choose from down_proj, gate_proj, ",
        "model.path = '/no/where' is no folder on this machine, and no id of the hub",
        "model.path = 'models/of/mine' is no folder",
        "model.path = 'missing.gguf' is not a file",
    ):
        assert words in done.stderr
