"""`python -m launch verify`: a file of completions in, a file of scores out, in order."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from launch.commands.verify import input_lines
from shared.errors import DataError

ROOT = Path(__file__).resolve().parents[3]
ROWS = [
    {"id": 7, "completion": "#### 18", "answer": "18"},
    {"id": "b", "completion": "#### 19", "answer": 18, "more": [1]},
    {"id": "c", "completion": "nothing", "answer": "#### 18"},
    {"id": "c", "completion": "#### 18", "answer": "none"},
]


def verify(tmp_path: Path, text: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "in.jsonl").write_text(text)
    files = ["--in", str(tmp_path / "in.jsonl"), "--out", str(tmp_path / "out.jsonl")]
    argv = [sys.executable, "-m", "launch", "verify", *files, *arguments]
    return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=100)


def scores(tmp_path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]


def test_rows_come_out_in_order(tmp_path: Path) -> None:
    done = verify(tmp_path, "\n".join(map(json.dumps, ROWS)) + "\n\n")
    assert done.returncode == 0, done.stderr
    assert scores(tmp_path) == [
        {"id": 7, "outcome": "correct", "score": 1.0, "final_answer": "18"},
        {"id": "b", "outcome": "wrong", "score": 0.0, "final_answer": "19"},
        {"id": "c", "outcome": "unparsable", "score": 0.0, "final_answer": None},
        {"id": "c", "outcome": "error", "score": 0.0, "final_answer": None},
    ]


def test_a_number_as_answer_is_compared_as_a_plain_decimal(tmp_path: Path) -> None:
    pairs = [
        ("0.00001", 1e-05),
        ("18", 18.0),
        ("100000000000000000000", 1e20),
        ("2.5", 2.5),
        ("-0.3", -0.3),
        ("7", 8.0),
    ]
    rows = [{"id": number, "completion": f"#### {text}", "answer": gold} for number, (text, gold) in enumerate(pairs)]
    for kind in ("exact", "math"):
        done = verify(tmp_path, "\n".join(map(json.dumps, rows)), "--kind", kind)
        assert done.returncode == 0, done.stderr
        assert [row["outcome"] for row in scores(tmp_path)] == ["correct"] * 5 + ["wrong"]


def test_a_byte_order_mark_is_no_part_of_the_first_row(tmp_path: Path) -> None:
    done = verify(tmp_path, "\ufeff" + "\r\n".join(map(json.dumps, ROWS[:2])) + "\r\n")
    assert done.returncode == 0, done.stderr
    assert [(row["id"], row["outcome"]) for row in scores(tmp_path)] == [(7, "correct"), ("b", "wrong")]


@pytest.mark.parametrize(("kind", "answer"), [("exact", "18"), ("math", r"\\frac{36}{2}")])
def test_the_kind_is_chosen(tmp_path: Path, kind: str, answer: str) -> None:
    done = verify(tmp_path, f'{{"id": 1, "completion": "It is 18.", "answer": "{answer}"}}', "--kind", kind)
    assert done.returncode == 0, done.stderr
    assert [row["outcome"] for row in scores(tmp_path)] == ["correct"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 2"),
        ("[]", "line 2"),
        ('{"id": 1, "completion": "x"}', "'answer'"),
        ('{"id": 1, "completion": 3, "answer": "18"}', "line 2: Expected"),
        ('{"id": [], "completion": "x", "answer": "18"}', "line 2"),
    ],
)
def test_a_bad_row_is_one_unparsable_row_in_its_place(tmp_path: Path, line: str, words: str) -> None:
    done = verify(tmp_path, json.dumps(ROWS[0]) + "\n" + line + "\n" + json.dumps(ROWS[1]) + "\n")
    assert done.returncode == 0
    assert "3 completions" in done.stderr and "unparsable 1" in done.stderr
    assert "1 of them could not be read" in done.stderr and words in done.stderr
    bad = scores(tmp_path)[1]
    assert words in str(bad.pop("note"))
    assert bad == {"id": 2, "outcome": "unparsable", "score": 0.0, "final_answer": None}
    assert [row["outcome"] for row in scores(tmp_path)] == ["correct", "unparsable", "wrong"]


def test_a_missing_file_and_a_wrong_kind_are_said(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "launch", "verify", "--in", str(tmp_path / "no"), "--out", str(tmp_path / "out")]
    many = (["--workers", "65"], "--workers got 65; expected at most 64.")
    for more, words in (([], "not a file"), (["--kind", "callable"], "callable"), many):
        done = subprocess.run([*argv, *more], cwd=ROOT, capture_output=True, text=True, timeout=100)
        assert (done.returncode, words in done.stderr, done.stderr.count("\n")) == (2, True, 1)


def test_a_name_that_is_too_long_is_no_file() -> None:
    with pytest.raises(DataError, match="which is not a file; give lines"):
        input_lines(Path("long" * 100), "lines")
