"""Two runs side by side: the verdict, its interval, the flips, and what cannot be compared."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from launch.__main__ import main
from launch.commands.compare import open_side
from shared.config.load import config_to_json
from shared.config.tree import Config
from shared.run.evaluation import write_evaluation
from shared.run.run_dir import RunDir
from shared.statistics import paired, sign_test
from tests.support.fakes import toy_evaluation
from tests.support.run_files import append_rows, metrics_rows


def run_of(path: Path, right: Sequence[bool], **changes: Any) -> Path:
    """A run that holds one evaluation."""
    run = RunDir.create(path, config_to_json(Config()))
    write_evaluation(run.eval, toy_evaluation(right, **changes))
    return path


def compared(capsys: pytest.CaptureFixture[str], *words: str | Path) -> str:
    assert main(["compare", *map(str, words)]) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *words: str | Path) -> str:
    assert main(["compare", *map(str, words)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    return err


def test_the_better_one_is_named_with_its_interval(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, poor = [i % 10 != 0 for i in range(100)], [i % 3 != 0 for i in range(100)]
    a, b = run_of(tmp_path / "a", good, version=40), run_of(tmp_path / "b", poor, version=20, adapter_sha256="cd" * 32)
    text = compared(capsys, a, b)
    expected = paired([float(x) for x in good], [float(x) for x in poor], 0.975)
    interval = f"97.5 % [{100 * expected.low:+.1f}, {100 * expected.high:+.1f}]: A is better"
    assert f"greedy   A 90.0%, B 66.0%: A - B = +24.0 points, {interval}" in text
    up, down = (
        sum(x and not y for x, y in zip(good, poor, strict=True)),
        sum(y and not x for x, y in zip(good, poor, strict=True)),
    )
    assert f"right in A alone {up}, in B alone {down}; sign test p = {sign_test(up, down):.3g}" in text
    assert f"{a}: final, after 40 steps, adapter abababababab" in text and "adapter cdcdcdcdcdcd" in text
    assert "on the same 100 tasks of embedded, verifier gsm8k, cap 64" in text
    assert "1 draws a task with seed 0 in A" in text
    assert "B is better" in compared(capsys, b, a)


def test_time_and_energy_of_two_runs_stand_beside_each_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = run_of(tmp_path / "a", [True] * 4), run_of(tmp_path / "b", [True] * 4)
    assert "time and energy" not in compared(capsys, a, b), "neither has a step"
    append_rows(a / "metrics.jsonl", metrics_rows([0.1] * 5 + [0.3] * 5))
    append_rows(b / "metrics.jsonl", [row | {"energy/cpu_j": 30.0} for row in metrics_rows([0.3] * 10)])
    lines = compared(capsys, a, b).partition("time and energy")[2].splitlines()
    words = {line[:26].strip(): line[26:].split("  ") for line in lines[1:]}
    found = {name: [part.strip() for part in parts if part.strip()] for name, parts in words.items()}
    assert found["points of reward"] == ["20.0", "none"]
    assert found["rollout"] == ["10 s, 0.5 s a point", "10 s"] and found["step"] == ["20 s, 1 s a point", "20 s"]
    assert found["energy of the processor"] == ["300 J"], "of B alone"
    assert "time and energy" not in compared(capsys, a / "eval" / "final.json", b)


def test_the_tasks_that_flipped_are_shown_with_both_completions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = (
        run_of(tmp_path / "a", [True, True, False, True, True]),
        run_of(tmp_path / "b", [True, False, True, False, True]),
    )
    text = compared(capsys, a, b, "--flips", "1")
    assert "right in A, wrong in B (1 of 2):" in text and "right in B, wrong in A (1 of 1):" in text
    lines = text[text.index("right in A, wrong") :].splitlines()
    assert lines[1:4] == ["  What is 1?  [gold 1]", "    right  It is 1", "    wrong  It is -1"]
    assert "What is 3?" not in text and "What is 2?" in text
    assert "What is" not in compared(capsys, a, b, "--flips", "0")
    assert "no significant difference at n = 5" in text


def test_what_a_model_wrote_cannot_command_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = run_of(tmp_path / "a", [True]), run_of(tmp_path / "b", [False])
    for path in (a, b):
        file = path / "eval" / "final.json"
        file.write_text(file.read_text().replace("It is", "\\u001b]52;c;ZXZpbA==\\u0007"))
    text = compared(capsys, a, b)
    assert "\x1b" not in text and text.count("\\x1b]52;c;ZXZpbA==\\x07") == 2


def test_shares_of_several_draws_are_judged_by_the_bootstrap(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Greedy completions are alike; the sampled ones differ by many amounts on many tasks."""

    def drawn(share: float) -> dict[str, Any]:
        whole = toy_evaluation([True] * 90)
        some = [structs.replace(t, sampled=min(1.0, share + (i % 7) / 16)) for i, t in enumerate(whole.task_results)]
        return {"task_results": tuple(some)} | way("sampled", draws=16)

    a, b = run_of(tmp_path / "a", [True] * 90, **drawn(0.5)), run_of(tmp_path / "b", [True] * 90, **drawn(0.375))
    greedy, sampled = compared(capsys, a, b).split("sampled  A", 1)
    assert "no significant difference at n = 90" in greedy and "sign test p = 1" in greedy
    assert "A is better" in sampled and "sign test" not in sampled


def test_base_and_result_of_one_run_by_their_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunDir.create(tmp_path / "run", config_to_json(Config()))
    write_evaluation(run.eval, toy_evaluation([False] * 30, label="base"))
    write_evaluation(run.eval, toy_evaluation([True] * 30, version=9))
    assert "B is better" in compared(capsys, run.eval / "base.json", run.path)
    assert "A - B = +0.0 points" in compared(capsys, run.path, run.path, "--label", "base")


def way(name: str, **changes: Any) -> dict[str, Any]:
    """One way to decode with something else about it."""
    return {name: structs.replace(getattr(toy_evaluation([True] * 4), name), **changes)}


UNLIKE: list[tuple[dict[str, Any], str]] = [
    ({"tasks_sha256": "others"}, "other tasks"),
    ({"verifier": "math"}, "another verifier (gsm8k against math)"),
    (way("greedy", cap=512), "another cap (64 against 512)"),
]


@pytest.mark.parametrize(("changes", "words"), UNLIKE, ids=[words for _, words in UNLIKE])
def test_unlike_data_are_refused_in_words(
    changes: dict[str, Any], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = run_of(tmp_path / "a", [True] * 4), run_of(tmp_path / "b", [True] * 4, **changes)
    sentence = refused(capsys, a, b)
    assert words in sentence and "run `eval` on both with the same data" in sentence
    assert re.search(r"error: \S+/a and \S+/b cannot be compared", sentence)


def test_the_same_tasks_from_another_file_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = run_of(tmp_path / "a", [True] * 30), run_of(tmp_path / "b", [False] * 30, source="data/test.jsonl")
    assert compared(capsys, a, b).count("A is better") == 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"temperature": 0.6}, "because A has temperature 1 and B 0.6"),
        ({"draws": 8}, "because A has 1 draws a task and B 8; run `eval` on both with the same --samples"),
    ],
)
def test_completions_that_were_sampled_otherwise_have_no_verdict(
    changes: dict[str, Any], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sampled = {"sampled": structs.replace(toy_evaluation([False] * 30).sampled, **changes)}
    a, b = run_of(tmp_path / "a", [True] * 30), run_of(tmp_path / "b", [False] * 30, **sampled)
    text = compared(capsys, a, b)
    assert f"sampled  A 100.0%, B 0.0%: no verdict, {words}" in text
    assert text.count("A is better") == 1, "greedy completions have theirs"
    page = pytest.importorskip("launch.ui.compare", reason="needs the extra `ui`", exc_type=ImportError)
    told = page.pair("a", "b", open_side(a, "final"), open_side(b, "final"), "")
    assert [way["name"] for way in told["ways"]] == ["greedy"]
    assert told["problem"] == f"no verdict on sampled answers, {words}"


def test_a_missing_evaluation_says_how_to_make_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = run_of(tmp_path / "a", [True] * 4)
    assert "--label got '../eval/base', expected the name of" in refused(capsys, a, a, "--label", "../eval/base")
    sentence = refused(capsys, a, a, "--label", "step-000010")
    assert "no evaluation 'step-000010' (there are: final)" in sentence and f"launch eval {a}" in sentence
    old = run_of(tmp_path / "old", [True] * 4, task_results=())
    assert "has no results per task" in refused(capsys, a, old)


@pytest.mark.parametrize(("up", "down"), [(4, 0), (5, 0), (7, 1), (6, 0)])
def test_a_few_flips_one_way_are_no_verdict(
    up: int, down: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Equal policies do this more often than once in forty comparisons, so it shows nothing."""
    n = 256
    a, b = [True] * n, [i >= up for i in range(n)]
    a[-down or n :] = [False] * down
    text = compared(capsys, run_of(tmp_path / "a", a), run_of(tmp_path / "b", b))
    assert text.count(f"no significant difference at n = {n}") == 2, text
    assert "is better" not in text


def test_seven_flips_one_way_are_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = [True] * 256, [i >= 7 for i in range(256)]
    text = compared(capsys, run_of(tmp_path / "a", a), run_of(tmp_path / "b", b))
    assert text.count("A is better") == 2
    assert "97.5 %" in text and "(Bonferroni)" in text and " 95 %" not in text


def test_a_name_that_is_too_long_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(tmp_path / ("long" * 100)), str(tmp_path)]) == 2
    assert "File name too long" in capsys.readouterr().err
