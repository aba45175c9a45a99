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
NO_NUMBER = "The gold answer 'none' is not a number; fix the data's answer column."


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
        {"id": "c", "outcome": "error", "score": 0.0, "final_answer": None, "note": NO_NUMBER},
    ]
    assert f"1 of them could not be scored, the first: {NO_NUMBER}" in done.stderr


REWARDS = """
def exact(prompts, completions, gold_answer, solution, weight, **columns):
    asked = [prompt[-1]["content"] for prompt in prompts]
    assert asked == ["3 + 4?"] * len(asked) and "id" not in columns, (asked, columns)
    said = [completion[0]["content"] for completion in completions]
    return [float(text == gold) * by for text, gold, by in zip(said, gold_answer, weight)]

def first(completions, **columns):
    best = max(completions, key=len)
    return [float(text == best) for text in completions]

def broken(completions, **columns):
    return [len(text) / 0 for text in completions]
"""
ASKED = {"prompt": "3 + 4?", "answer": "3 + 4 is\n#### 7", "weight": 0.75}
WRITTEN = [ASKED | {"id": "a", "completion": "7"}, ASKED | {"id": "b", "completion": "seven"}]


def verify_with(tmp_path: Path, name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "rewards.py").write_text(REWARDS)
    function = f"{tmp_path / 'rewards.py'}:{name}"
    return verify(tmp_path, "\n".join(map(json.dumps, WRITTEN)), "--function", function, *arguments)


def test_a_function_gets_what_it_gets_in_a_run(tmp_path: Path) -> None:
    done = verify_with(tmp_path, "exact")
    assert done.returncode == 0, done.stderr
    assert scores(tmp_path) == [
        {"id": "a", "outcome": "correct", "score": 0.75, "final_answer": None},
        {"id": "b", "outcome": "wrong", "score": 0.0, "final_answer": None},
    ]


def test_the_completions_of_a_prompt_are_a_group_and_more_rewards_are_named(tmp_path: Path) -> None:
    more = ["--set", "verifier.form=text", "--set", 'verifier.rewards={"think_tags" = 0.5}', "--workers", "2"]
    done = verify_with(tmp_path, "first", *more)
    assert done.returncode == 0, done.stderr
    found = {"final_answer": None, "rewards": {"think_tags": 0.0}}
    assert scores(tmp_path) == [
        {"id": "a", "outcome": "wrong", "score": 0.0, **found},
        {"id": "b", "outcome": "correct", "score": 1.0, **found},
    ]


def test_where_several_rewards_add_up_what_is_correct_is_said(tmp_path: Path) -> None:
    rewards = f'verifier.rewards={{"{tmp_path / "rewards.py"}:exact" = 1.0, "think_tags" = 0.5}}'
    (tmp_path / "rewards.py").write_text(REWARDS)
    rows = "\n".join(map(json.dumps, WRITTEN))
    done = verify(tmp_path, rows, "--set", "verifier.kind=callable", "--set", rewards)
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("note: a completion counts as correct if the weighted sum of its rewards is at least")
    assert "name it with verifier.correct (exact, think_tags)" in done.stderr
    done = verify(
        tmp_path, rows, "--set", "verifier.kind=callable", "--set", rewards, "--set", "verifier.correct=exact"
    )
    assert "note:" not in done.stderr


def test_a_function_that_fails_is_told_row_by_row(tmp_path: Path) -> None:
    done = verify_with(tmp_path, "broken")
    assert done.returncode == 0, done.stderr
    assert "2 of them could not be scored, the first: The reward function raised ZeroDivisionError" in done.stderr
    assert [row["outcome"] for row in scores(tmp_path)] == ["error"] * 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--function", "nowhere.py:name"], "there is no such file"),
        (["--function", "nowhere.py:name", "--kind", "math"], "not allowed with"),
        (["--set", "optimizer.lr=1"], "--set got a key of [optimizer], expected one of [verifier]"),
    ],
)
def test_a_function_that_is_not_there_is_said(tmp_path: Path, arguments: list[str], words: str) -> None:
    done = verify(tmp_path, json.dumps(WRITTEN[0]), *arguments)
    assert (done.returncode, words in done.stderr, done.stderr.count("\n")) == (2, True, 1), done.stderr


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
