"""`curriculum` on the embedded model: measured once, then read; the same at every seed of the run."""

import json
from pathlib import Path

import pytest

from launch.__main__ import main
from learner.curriculum.semantic_entropy import SemanticEntropies, part_of
from tests.support.runs import launch, start, wait_until

SMALL = (
    "tasks.limit=6",
    "tasks.levels=[3]",
    "rollout.prompts=4",
    "rollout.max_new_tokens=40",
    "curriculum.samples=4",
    "compute.actor_threads=1",
)


def arguments(file: Path, *more: str) -> list[str]:
    pairs = [("--set", key) for key in (*SMALL, f"curriculum.cache={file}", "curriculum.stages=1", *more)]
    return ["curriculum", "embedded", *(word for pair in pairs for word in pair)]


def test_it_is_measured_once_and_read_by_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "deep" / "se.json"
    assert main(arguments(file)) == 0
    first = capsys.readouterr()
    assert "measuring: " in first.err
    assert "6 tasks, 4 completions, temperature 1, at most 40 tokens" in first.out and str(file) in first.out
    data = file.read_bytes()
    found = json.loads(data)["tasks"]
    assert [sum(task["clusters"]) for task in found] == [4] * 6
    assert all(0 <= task["right"] <= 4 for task in found)
    assert len({tuple(task["clusters"]) for task in found}) > 1

    assert main(arguments(file, "run.seed=9")) == 0
    again = capsys.readouterr()
    assert "measuring: " not in again.err and again.out == first.out

    other = tmp_path / "other.json"
    assert main(arguments(other, "run.seed=9", "rollout.prompts=6")) == 0
    assert SemanticEntropies.__struct_fields__ == tuple(json.loads(other.read_bytes()))
    assert other.read_bytes() == data, "how many are decoded together changes no completion"

    assert main(arguments(other, "verifier.kind=math", "verifier.strict=false")) == 0
    assert "another verifier (gsm8k, strict, not math)" in capsys.readouterr().err
    assert json.loads(other.read_bytes())["tasks"] == found, "whole numbers mean the same to both"

    assert main(arguments(file, "rollout.temperature=0.5")) == 0
    assert "are of another sampling" in capsys.readouterr().err
    assert file.read_bytes() != data


def test_tasks_whose_columns_do_not_fit_into_a_message_are_measured_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "t.jsonl").write_text(
        "".join(json.dumps({"question": f"{n}?", "answer": str(n), "tests": "x" * 60_000}) + "\n" for n in range(160))
    )
    large = (f"tasks.source={tmp_path / 't.jsonl'}", "tasks.limit=144", "rollout.prompts=144")
    main(arguments(tmp_path / "se.json", *large, "curriculum.samples=2", "rollout.max_new_tokens=2"))
    assert "Only 0 of 144 tasks" in capsys.readouterr().err, "nobody answers in two tokens"
    assert len(json.loads((tmp_path / "se.json").read_bytes())["tasks"]) == 144


def test_a_function_of_the_user_s_own_cannot_say_what_means_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["curriculum", "embedded", "--set", "verifier.kind=callable", "--set", "verifier.function=f.py:f"]
    assert main(argv) == 2
    assert "needs 'gsm8k', 'exact' or 'math'" in capsys.readouterr().err


def test_a_conversation_has_no_semantic_entropy(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["curriculum", "calculator"]) == 2
    assert "semantic entropy is measured on replies to the question alone" in capsys.readouterr().err


@pytest.mark.long
def test_a_kill_loses_one_batch_at_most_and_changes_no_byte(tmp_path: Path) -> None:
    more = ("rollout.prompts=1", "curriculum.samples=3", "tasks.limit=8")
    whole, killed = tmp_path / "whole.json", tmp_path / "killed.json"
    assert main(arguments(whole, *more)) == 0
    begun = start(*arguments(killed, *more))
    wait_until(lambda: part_of(killed).is_file() and part_of(killed).read_bytes().count(b"\n") >= 3, "two batches")
    begun.kill()
    begun.communicate(timeout=60)
    assert not killed.exists()
    done = launch(*arguments(killed, *more))
    assert done.returncode == 0, done.stderr
    assert "of 8 tasks are measured already" in done.stderr
    assert killed.read_bytes() == whole.read_bytes()
    assert not part_of(killed).exists() and not part_of(whole).exists()
