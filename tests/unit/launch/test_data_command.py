"""`python -m launch data`: what would be trained on, as the learner would read it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from launch.commands.data import lengths, report, table
from learner.tasks.tasks import load_tasks, load_test
from shared.config.data import TasksConfig, VerifierConfig
from shared.config.tree import Config
from shared.embedded import EMBEDDED_DIR
from shared.model.prompt import load_prompter

ROOT = Path(__file__).resolve().parents[3]
LONG = " ".join(f"word{n}" for n in range(12))


pytestmark = pytest.mark.usefixtures("own_cache")


def test_the_report_counts_what_is_there(tmp_path: Path) -> None:
    rows = [{"question": f"{n}?", "answer": str(n), "level": 1 + n % 2, "subject": "sums"} for n in range(18)]
    rows += [rows[0] | {"answer": "5"}, {"question": LONG, "answer": "none"}]
    leaks = [rows[3], {"question": LONG, "answer": "7", "level": 1, "subject": "words"}]
    test = [*leaks, {"question": "100?", "answer": "100", "level": 2, "subject": "sums"}]
    for name, part in (("train", rows), ("validation", leaks), ("test", test)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    section = TasksConfig(source=str(tmp_path), held_out="validation", system_prompt="Be brief.")
    config = Config(tasks=section, verifier=VerifierConfig())
    prompter = load_prompter(EMBEDDED_DIR)
    tasks = load_tasks(config.tasks, prompter, "gsm8k")
    tested, _ = load_test(config.tasks, prompter, "gsm8k")
    text = "\n".join(report(tasks, tested, prompter, 1))
    tokens = [len(task.prompt_ids) for task in tasks.train]
    assert f"train     19 tasks, prompts of {min(tokens)} to {max(tokens)} tokens, median" in text
    assert "held out  2 tasks" in text and "test      3 tasks" in text
    assert "left out  1 rows with a gold answer that verifier.kind = 'gsm8k' cannot read" in text
    assert "twice     1 training questions" in text and "duplicate: 0?" in text
    assert "twice     1 of these have another answer" in text
    assert "twice     1 held-out questions are trained on too" in text and "leaked: 3?" in text
    assert "twice     1 test questions are trained on too" in text and text.count("leaked: 3?") == 2
    assert (
        "\nsums     1          10         0       0\n" in text and "\nwords    1           0         1       1" in text
    )
    seen = prompter.as_the_model_sees(tasks.train[0].prompt_ids.tolist())
    assert "\n".join(f"  | {line}" for line in seen.split("\n")) in text
    assert "Be brief." in seen and "example 2" not in text and f"\n  answer: {tasks.train[0].columns['answer']}" in text


def test_tasks_without_an_answer_are_counted_where_nobody_needs_one(tmp_path: Path) -> None:
    rows = [{"question": f"{n}?", "gold": None if n < 7 else n} for n in range(20)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompter = load_prompter(EMBEDDED_DIR)
    words = {"gold": ["answers   7 of 20 tasks have no answer: functions get None as their answer"], "": []}
    for answer, said in words.items():
        tasks = load_tasks(TasksConfig(source=str(tmp_path), answer=answer), prompter, "callable")
        assert [line for line in report(tasks, (), prompter, 0) if line.startswith("answers")] == said


def test_a_data_set_cannot_command_the_terminal(tmp_path: Path) -> None:
    row = {"question": "1?\x1b]52;c;ZXZpbA==\x07", "answer": "1", "hint": "\x1b[2J", "subject": "\x1b[1m"}
    (tmp_path / "train.jsonl").write_text(f"{json.dumps(row)}\n" * 2)
    prompter = load_prompter(EMBEDDED_DIR)
    tasks = load_tasks(TasksConfig(source=str(tmp_path)), prompter, "gsm8k")
    text = "\n".join(report(tasks, (), prompter, 1))
    assert "\x1b" not in text and all(escaped in text for escaped in ("\\x1b]52", "\\x1b[2J", "\\x1b[1m"))


def test_a_data_set_without_level_or_subject_has_no_table(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"question": "1?", "answer": 1}\n' * 2)
    tasks = load_tasks(TasksConfig(source=str(tmp_path)), load_prompter(EMBEDDED_DIR), "gsm8k")
    assert list(table(tasks, ())) == [] and lengths(()) == ""


def launch(*arguments: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "launch", "data", *arguments]
    return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=100)


@pytest.mark.long
def test_the_command_prints_it_for_a_preset() -> None:
    done = launch("embedded", "--set", "tasks.limit=20", "--examples", "1")
    assert done.returncode == 0, done.stderr
    assert "train     20 tasks" in done.stdout and done.stdout.count("as the model sees it") == 1
    assert "<|im_start|>user" in done.stdout


def test_what_cannot_be_read_is_one_sentence() -> None:
    done = launch("embedded", "--set", "tasks.source=missing.csv")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "missing.csv" in done.stderr
