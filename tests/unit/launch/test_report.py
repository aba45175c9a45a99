"""The end report: what a person sees when a run is done, stopped, or never began."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec import structs
from rich.console import Console

from launch.display.console import interpreter, script
from launch.display.report import joules, print_evaluation, print_report, spent_rows
from shared.errors import DamageError
from shared.run.evaluation import Example, share_of, write_evaluation
from shared.run.forecast import Figures, Spent
from shared.run.run_dir import RunDir
from shared.run.summary import RunVerdict, read_summary, write_summary
from shared.statistics import paired
from tests.support.fakes import toy_evaluation
from tests.support.run_files import SHA, append_rows, metrics_row, write_run

REWARDS = [0.5] * 5 + [0.7] * 30 + [0.9] * 5


def reported(run: RunDir, *, width: int = 100, encoding: str = "utf-8", can_be_extended: bool = True) -> str:
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(file=file, width=width, record=True, highlight=False)
    print_report(console, run, steps=40, can_be_extended=can_be_extended)
    return console.export_text()


def test_a_finished_run_shows_base_and_trained_side_by_side(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    write_run(run, status="done", rewards=REWARDS, evaluated=("base", "final"))
    text = reported(run)
    assert "done: 40 steps in 1:02" in text
    base, trained = (line for line in text.splitlines() if line.strip().startswith(("base  ", "trained  ")))
    assert "50.0 %  (43.9 to 56.1)" in base
    assert "46.9 %" in base
    assert base.split()[-3:] == ["256", "0", "s"]
    assert "93.8 %" in trained
    assert "first five steps 0.50" in text
    assert "last five 0.90" in text
    assert SHA in text


@pytest.mark.parametrize(
    ("losses", "first", "last"), [((4.0, None, 3.0, 2.0, None), "3.00", "3.00"), ((None, None), "-", "-")]
)
def test_skipped_steps_of_a_warm_start_are_left_out(
    tmp_path: Path, losses: tuple[float | None, ...], first: str, last: str
) -> None:
    run = RunDir(tmp_path)
    write_run(run, status="done", rewards=[], evaluated=())
    rows = [metrics_row(step, 0.0, **{"reward/mean": None, "loss": loss}) for step, loss in enumerate(losses, start=1)]
    append_rows(run.metrics, rows)
    (line,) = (line for line in reported(run).splitlines() if line.startswith("loss: "))
    assert line.startswith(f"loss: first five steps {first}  ") and line.endswith(f"  last five {last}")


def test_the_gain_is_told_in_pairs_where_both_were_evaluated_on_the_same_tasks(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    write_run(run, status="done", rewards=REWARDS, evaluated=())
    before, after = [i % 2 == 0 for i in range(40)], [i % 8 != 7 for i in range(40)]
    write_evaluation(run.eval, toy_evaluation(before, label="base", seed=3))
    write_evaluation(run.eval, toy_evaluation(after, seed=3))
    found = paired([float(r) for r in after], [float(r) for r in before])
    text = reported(run)
    assert f"in pairs: +37.5 points  ({100 * found.low:+.1f} to {100 * found.high:+.1f})" in text and "seed 3" in text
    write_evaluation(run.eval, toy_evaluation(after, tasks_sha256="others"))
    assert "in pairs" not in reported(run)


def test_the_mean_reward_is_told_where_it_says_more_than_right_and_wrong(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    write_run(run, status="done", rewards=REWARDS, evaluated=())
    for label, reward in (("base", 0.125), ("final", 0.5)):
        found = toy_evaluation([False] * 4, label=label)
        assert "mean reward" not in reported(run)
        write_evaluation(
            run.eval, structs.replace(found, sampled=structs.replace(found.sampled, rewards={"mean": reward}))
        )
    assert "mean reward, sampled: base 0.125, trained 0.500" in reported(run)


def test_the_verdict_of_why_is_part_of_the_report(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    write_run(run, status="done", rewards=REWARDS, evaluated=())
    assert "answers are cut off" not in reported(run)
    summary = read_summary(run)
    assert summary
    found = RunVerdict(
        name="answers are cut off", fault=True, evidence="92 % of them", remedy="Try a larger cap", sure=1.0, harm=1.0
    )
    write_summary(run, structs.replace(summary, why=found))
    assert "answers are cut off: 92 % of them. Try a larger cap." in " ".join(reported(run).split())


def test_what_a_model_wrote_cannot_command_the_terminal(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    write_run(run, status="done", rewards=REWARDS, evaluated=())
    sample = Example(question="\x1b]0;q\x07", completion="\x1b]52;c;ZXZpbA==\x07[2]", outcome="wrong")
    for label in ("base", "final"):
        write_evaluation(run.eval, toy_evaluation([True], label=label, examples=(sample,)))
    text = reported(run)
    assert "\x1b" not in text and text.count("\\x1b]52;c;ZXZpbA==\\x07[2]") == 2


def test_names_of_subjects_are_text() -> None:
    file = io.StringIO()
    found = toy_evaluation([True])
    subject = {"[/sums]\x1b[2J": share_of([1.0])}
    print_evaluation(
        Console(file=file, width=120), structs.replace(found, greedy=structs.replace(found.greedy, by_subject=subject))
    )
    assert "[/sums]\\x1b[2J" in file.getvalue()


def test_three_questions_are_shown_with_both_completions(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    write_run(run, status="done", rewards=REWARDS, evaluated=("base", "final"))
    text = reported(run)
    assert "Ann has 12 [apples] and buys 7. How many?" in text
    assert text.count("base says") == text.count("final says") == 3
    assert any("base says 6 * 9 = 52" in line and "final says 6 * 9 = 52" in line for line in text.splitlines())
    assert "base: truncated" in text
    assert "fourth" not in text


def test_predicted_and_measured_cost_are_side_by_side(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    write_run(run, status="done", rewards=REWARDS, evaluated=())
    assert "tokens per completion" not in reported(run)
    summary = read_summary(run)
    assert summary
    predicted = Figures(step_s=2.0, rollout_s=1.25, learner_mb=1500, actor_mb=900, completion_tokens=64)
    measured = Figures(step_s=2.5, rollout_s=1.5, update_s=0.9, learner_mb=1400, completion_tokens=41.4)
    write_summary(run, structs.replace(summary, predicted=predicted, measured=measured))
    lines = [line.split() for line in reported(run).splitlines()]
    assert ["time", "per", "step", "2", "s", "2.5", "s"] in lines
    assert ["decoding", "1.2", "s", "1.5", "s"] in lines
    assert ["memory", "of", "the", "learner", "1500", "MiB", "1400", "MiB"] in lines
    assert ["tokens", "per", "completion", "64", "41"] in lines
    assert not any(line[:1] == ["update"] for line in lines), "not predicted"


def test_what_a_point_of_reward_took_is_a_table() -> None:
    found = Spent(
        points=20.0,
        seconds={"rollout": 30.0, "step": 60.0},
        seconds_per_point={"rollout": 1.5, "step": 3.0},
        joules={"card": 45_000.0},
        joules_per_point={"card": 2250.0},
        unread={"cpu": "forbidden"},
    )
    assert list(spent_rows(found)) == [
        ("points of reward", "20.0", ""),
        ("rollout", "30 s", "1.5 s"),
        ("step", "60 s", "3 s"),
        ("energy of the card", "45 kJ", "2250 J"),
        ("energy of the processor", "forbidden", ""),
    ]
    without = structs.replace(found, points=None, seconds_per_point={}, joules_per_point={})
    assert [row[1:] for row in spent_rows(without)][:2] == [("none", ""), ("30 s", "")]
    assert [joules(amount) for amount in (0.314, 99.6, 812.3, 3.42e6)] == ["0.314 J", "99.6 J", "812 J", "3.42 MJ"]


def test_the_next_commands_of_a_finished_run(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "with space")
    run.path.mkdir()
    write_run(run, status="done", rewards=REWARDS, evaluated=("base", "final"))
    lines = reported(run, width=40).splitlines()
    for expected in (
        f"-m launch generate '{run.path}' --prompt 'What is 3 + 4?'",
        f"-m launch resume '{run.path}' --steps 80",
        f"-m launch export '{run.path}' --out 'with space-adapter'",
        f"-m launch replay '{run.path}'",
    ):
        assert any(expected in line for line in lines), expected
    assert "launch resume" not in reported(run, can_be_extended=False)


@pytest.mark.parametrize(
    ("questions", "suggested"),
    [
        (
            ["Who ate\nthe cook's egg?", "Who wrote the longer of both books?"],
            "--prompt 'Who ate the cook'\"'\"'s egg?'",
        ),
        (["x" * 300], f"--prompt {'x' * 200}..."),
        (["\x1b[2J"], "--prompt '\\x1b[2J'"),
        (["-1+2?", " "], "--chat"),
        ([], "--chat"),
    ],
)
def test_a_question_of_the_run_is_suggested(tmp_path: Path, questions: list[str], suggested: str) -> None:
    run = RunDir(tmp_path)
    write_run(run, status="done", rewards=REWARDS, evaluated=())
    examples = tuple(Example(question=text, completion="", outcome="wrong") for text in questions)
    write_evaluation(run.eval, toy_evaluation([True], label="final", examples=examples))
    assert f"-m launch generate {run.path} {suggested}\n" in reported(run)


@pytest.mark.parametrize("status", ["stopped", "running"])
def test_a_stopped_run_says_how_to_go_on(tmp_path: Path, status: str) -> None:
    run = RunDir(tmp_path)
    # There may be a final evaluation from an end before `resume --steps`.
    write_run(run, status=status, rewards=REWARDS[:12], evaluated=("base", "final"))
    text = reported(run)
    assert "stopped after step 12 of 40" in text
    assert f"-m launch resume {run.path}\n" in text
    assert "trained" not in text
    assert "generate" not in text


def test_a_run_that_never_began_still_has_a_report(tmp_path: Path) -> None:
    text = reported(RunDir(tmp_path))
    assert "stopped before the run began" in text
    assert "resume" in text


def test_a_run_without_evaluation_has_no_table(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    write_run(run, status="done", rewards=REWARDS, evaluated=())
    text = reported(run)
    assert "accuracy" not in text
    assert "last five 0.90" in text


def test_the_report_has_an_ascii_form(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    write_run(run, status="done", rewards=REWARDS, evaluated=("base", "final"))
    assert reported(run, encoding="ascii").isascii()


def test_a_damaged_summary_is_named(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.summary.write_text('{"status": "done"')
    with pytest.raises(DamageError, match=r"summary\.json cannot be read"):
        read_summary(run)


def test_commands_name_the_interpreter_that_runs(tmp_path: Path) -> None:
    venv = tmp_path / ".venv" / "bin"
    venv.mkdir(parents=True)
    running = str(venv / "python3")
    assert interpreter(running, on_path=str(venv / "python")) == "python"
    assert interpreter(running, on_path="/usr/bin/python") == running
    assert interpreter(running, on_path=None) == running
    assert interpreter(str(Path.cwd() / ".venv/bin/python"), on_path=None) == ".venv/bin/python"


def test_a_pipe_is_no_terminal_even_where_colours_are_forced() -> None:
    code = "from launch.display.console import make_console as m; print(m().is_terminal, m().width)"
    environment = os.environ | {"FORCE_COLOR": "1", "TERM": "xterm-color"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "False 120\n"


def test_a_command_of_an_installed_tandem_names_it_as_it_works_here(tmp_path: Path) -> None:
    called = tmp_path / "tandem"
    called.write_text("")
    assert script(str(called), on_path=str(called)) == "tandem"
    assert script(str(called), on_path="/usr/bin/tandem") == str(called)
    assert script(str(called), on_path=None) == str(called)
