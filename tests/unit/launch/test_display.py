"""The picture and the plain lines of a run, from made-up rows to what a person sees."""

import io
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from launch.display.live import View, draw
from launch.display.screens import LiveScreen, Pace, PlainScreen, bare, loud, make_screen, step_line
from launch.display.sparkline import BLOCKS, sparkline
from launch.display.watch import Watch, clock, outcome_shares, seconds, seconds_left, steps_done, time_shares
from shared.config.load import config_to_json
from shared.config.tree import Config
from shared.run.growing_file import GrowingFile, last_lines
from shared.run.metrics import MetricsTable
from shared.run.run_dir import RunDir
from tests.support.run_files import append_rows, metrics_row, metrics_rows
from tests.support.runs import ROOT


def recorded(*, terminal: bool = False, width: int = 110, encoding: str = "utf-8") -> Console:
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    return Console(file=file, width=width, record=True, force_terminal=terminal, highlight=False)


def drawn(view: View, *, width: int = 110, encoding: str = "utf-8") -> str:
    console = recorded(width=width, encoding=encoding)
    console.print(draw(view))
    return console.export_text()


def view(rows: list[dict[str, Any]], **changes: Any) -> View:
    told: dict[str, Any] = {"title": "runs/first", "steps": 40, "elapsed_s": 24.0, "last_lines": {}, "notes": ()}
    return View(rows=rows, **(told | changes))


# --- the curve


def test_a_sparkline_has_one_column_a_step_and_keeps_the_scale_of_a_share() -> None:
    (line,) = sparkline([0.0, 0.25, 0.5, 1.0], steps=4, width=4)
    assert line == BLOCKS[1] + BLOCKS[2] + BLOCKS[4] + BLOCKS[8]


def test_a_sparkline_grows_to_the_right_as_the_run_goes_on() -> None:
    assert len(sparkline([0.5] * 10, steps=40, width=80)[0]) == 20
    assert len(sparkline([0.5] * 40, steps=40, width=80)[0]) == 80
    assert sparkline([], steps=40, width=80) == [""]


def test_a_sparkline_narrower_than_the_run_averages() -> None:
    assert sparkline([0.0, 1.0] * 50, steps=100, width=10)[0] == BLOCKS[4] * 10


def test_a_width_that_divides_badly_shows_every_step_up_to_the_last() -> None:
    for done in range(1, 38):
        line = sparkline([0.0] * (done - 1) + [1.0], steps=37, width=50)[0]
        assert line.endswith(BLOCKS[8]), done


def test_a_sparkline_of_several_lines_fills_from_below() -> None:
    top, bottom = sparkline([0.25, 0.75], steps=2, width=2, height=2)
    assert bottom == BLOCKS[4] + BLOCKS[8]
    assert top == " " + BLOCKS[4]


def test_rewards_outside_a_share_take_their_own_scale() -> None:
    assert sparkline([-3.0, 5.0], steps=2, width=2)[0] == BLOCKS[1] + BLOCKS[8]
    assert len(sparkline([2.0, 2.0], steps=2, width=2)[0]) == 2


def test_a_sparkline_can_do_without_unicode() -> None:
    assert sparkline([0.0, 1.0], steps=2, width=2, ascii_only=True)[0].isascii()


def test_a_step_that_was_not_measured_is_a_gap_and_changes_no_scale_and_no_mean() -> None:
    unknown = float("nan")
    assert sparkline([unknown, 2.0, unknown, 4.0], steps=4, width=4)[0] == " " + BLOCKS[1] + " " + BLOCKS[8]
    assert sparkline([unknown, 1.0] * 50, steps=100, width=10)[0] == BLOCKS[8] * 10
    assert sparkline([unknown] * 2, steps=2, width=2, height=2) == ["  ", "  "]


# --- what is known


def test_watch_reads_a_growing_file_and_leaves_a_torn_line_for_later(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    watch = Watch(metrics)
    assert watch.poll() == []
    line = json.dumps(metrics_row(1, 0.5)) + "\n"
    metrics.write_text(line[:20])
    assert watch.poll() == []
    with metrics.open("a") as file:
        file.write(line[20:])
    assert [row["step"] for row in watch.poll()] == [1]
    append_rows(metrics, [metrics_row(2, 0.6)])
    assert [row["step"] for row in watch.poll()] == [2]
    assert steps_done(watch.rows) == 2
    assert watch.poll() == []


def test_watch_starts_again_when_a_resumed_run_drops_rows(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    append_rows(metrics, metrics_rows([0.1, 0.2, 0.3]))
    watch = Watch(metrics)
    watch.poll()
    # As shared/run/files.py does it: another file under the same name, and by now longer than the old one.
    other = tmp_path / "other"
    append_rows(other, metrics_rows([0.1, 0.9, 0.9, 0.9]))
    other.rename(metrics)
    assert [row["step"] for row in watch.poll()] == [2, 3, 4]
    assert [row["reward/mean"] for row in watch.rows] == [0.1, 0.9, 0.9, 0.9]


def test_a_long_run_is_read_again_in_a_moment(tmp_path: Path) -> None:
    metrics, other = tmp_path / "metrics.jsonl", tmp_path / "other"
    same = {f"figure {number}": 0.0 for number in range(60)}
    for path in (metrics, other):
        path.write_text("".join(json.dumps({**same, "step": step}) + "\n" for step in range(1, 4001)))
    watch = Watch(metrics)
    watch.poll()
    other.rename(metrics)
    start = time.process_time()
    assert watch.poll() == []
    assert time.process_time() - start < 3.0


def test_watch_passes_over_what_a_power_cut_left(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_bytes(b"\0\0\0\0\n" + json.dumps(metrics_row(1, 0.5)).encode() + b"\n")
    watch = Watch(metrics)
    assert [row["step"] for row in watch.poll()] == [1]


def test_a_file_that_became_shorter_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("one\ntwo\n")
    grows = GrowingFile(path)
    assert grows.new_lines() == ["one", "two"]
    path.write_text("new\n")
    assert grows.new_lines() == ["new"]
    assert grows.generation == 1


def test_a_file_that_is_gone_has_no_rows_and_the_next_one_is_read_from_its_start(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append_rows(path, metrics_rows([0.1, 0.2]))
    table, watch = MetricsTable(path), Watch(path)
    assert len(table) == len(watch.poll()) == 2
    path.unlink()
    assert (len(table), watch.poll(), watch.rows) == (0, [], [])
    assert len(table) == 0 and table.generation == 1, "once for each file"
    append_rows(path, metrics_rows([0.7, 0.8, 0.9]))
    assert len(table) == len(watch.poll()) == 3 and table.row(0)["reward/mean"] == 0.7


def test_last_lines_show_the_end_torn_line_included_and_stop_at_the_start(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("".join(f"line {n}\n" for n in range(5000)) + "torn")
    assert last_lines(path, 3) == ["line 4998", "line 4999", "torn"]
    assert last_lines(path, 3, start=path.stat().st_size - 4) == ["torn"]
    assert last_lines(tmp_path / "none", 3) == []


def test_shares_and_time_left() -> None:
    rows = metrics_rows([0.25] * 8)
    assert time_shares(rows) == pytest.approx({"rollout": 0.5, "verify": 0.05, "update": 0.4, "idle": 0.05})
    assert outcome_shares(rows[-1]) == {"correct": 0.25, "wrong": 0.75}
    assert seconds_left(rows, steps=40) == pytest.approx(64.0)
    assert time_shares([{"step": 1}]) == {}


def test_clock() -> None:
    assert [clock(s) for s in (0, 59.6, 75.2, 3700)] == ["0:00", "1:00", "1:15", "1:01:40"]
    assert clock(float("nan")) == "-"


def test_times_are_told_in_a_unit_that_fits() -> None:
    assert [seconds(t) for t in (0.042, 1.26, 45.2, 300, 9000)] == ["0.042 s", "1.3 s", "45 s", "5 min", "2.5 h"]


# --- the live picture


def test_the_picture_shows_every_figure_of_the_contract() -> None:
    text = drawn(view(metrics_rows([0.5, 0.5, 0.5, 0.5, 0.5, 0.7, 0.7, 0.7, 0.7, 0.75])))
    for expected in (
        "runs/first",
        "step 10/40",
        "0:24 so far, 1:00 left",
        "reward 0.75",
        "last five 0.71",
        "first five 0.50",
        "correct 75%",
        "wrong 25%",
        "rollout 50%",
        "verify 5%",
        "update 40%",
        "idle 5%",
        "5,321 tokens/s",
        "entropy 0.625",
        "lr 2.0e-03",
        "idle groups 3/16",
        "mismatch p99 3e-06",
        "learner 1,431 MB",
        "actor 402 MB",
    ):
        assert expected in text, expected
    assert "timeout" not in text


def test_several_actors_have_a_line_each_and_one_has_none() -> None:
    assert "faults" not in drawn(view(metrics_rows([0.5])))
    figures = {"tokens_per_s": 1234.5, "waiting": 0.25, "faults": 2.0, "version": 7.0}
    rows = metrics_rows([0.5])
    rows[-1] |= {f"actors/box\x1b[31m{n}/{name}": figure for n in range(9) for name, figure in figures.items()}
    rows[-1] |= {"actors/gone/faults": None, "limited/link.credits": 0.5}
    text = drawn(view(rows))
    assert "\x1b" not in text and text.count(" 25% ") == 8
    assert all(word in text for word in ("1,234", "and 1 more", "link.credits costs the actors 50% of their time"))
    assert "gone" not in text


def test_before_the_first_step_the_picture_says_what_is_awaited() -> None:
    last_lines = {"learner": "base evaluation 128/256", "actor0": "ready"}
    text = drawn(view([], last_lines=last_lines, notes=["actor0 ended with exit code 1; starting it again (1 of 5)"]))
    assert "step 0/40" in text
    assert "learner | base evaluation 128/256" in text
    assert "actor0 | ready" in text
    assert "1 of 5" in text
    assert "left" not in text
    assert "starting: both" not in text
    assert "starting: both processes load torch" in drawn(view([]))


def test_the_picture_fits_a_narrow_terminal_and_a_long_log_line() -> None:
    last_lines = {"learner": "x" * 500}
    for width in (40, 80, 200):
        lines = drawn(view(metrics_rows([0.5] * 40), last_lines=last_lines), width=width).splitlines()
        assert max(map(len, lines)) <= width
        assert sum("learner | x" in line for line in lines) == 1


def test_the_picture_has_an_ascii_form() -> None:
    assert drawn(view(metrics_rows([0.5] * 40)), encoding="ascii").isascii()


def test_markup_in_a_log_line_is_text() -> None:
    assert "[/red] 100 [bold]" in drawn(view([], last_lines={"learner": "[/red] 100 [bold]"}))


def test_markup_in_the_name_of_a_folder_is_text() -> None:
    assert "tandem  runs/exp[v2] [/x]" in drawn(view([], title="runs/exp[v2] [/x]"))


def test_missing_figures_become_dashes() -> None:
    text = drawn(view([{"step": 1, "reward/mean": 0.5, "kl": None}]))
    assert "entropy -" in text
    assert "mismatch p99 -" in text


@pytest.mark.parametrize(
    ("losses", "words"),
    [
        ((4.0, None, 2.0), "loss 2.00   last five 3.00   first five 3.00"),
        ((None, 4.0, 2.0), "loss 2.00   last five 3.00   first five 3.00"),
        ((4.0, 2.0, None), "loss -   last five 3.00   first five 3.00"),
        ((None, None, None), "loss -   last five -   first five -"),
    ],
)
def test_a_step_of_a_warm_start_that_was_skipped_is_a_gap(losses: tuple[float | None, ...], words: str) -> None:
    rows = [metrics_row(step, 0.0, **{"reward/mean": None, "loss": loss}) for step, loss in enumerate(losses, start=1)]
    lines = drawn(view(rows)).splitlines()
    assert any(words in line for line in lines)
    top, bottom = ("4.0  ", "2.0  ") if any(losses) else ("1.0  ", "0.0  ")
    assert any(top in line for line in lines) and any(bottom in line for line in lines)


def test_the_live_screen_follows_the_file_and_keeps_warnings_above(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    console = recorded(terminal=True)
    with LiveScreen(console, run, 40) as live:
        live.log_line("learner", "2026-01-02 03:04:05,678 INFO loading the model")
        live.log_line("learner", "WARNING a group came twice")
        assert live.tick() == 0
        append_rows(run.metrics, metrics_rows([0.5, 0.6]))
        assert live.tick() == 2
        live.note("finishing the step; Ctrl-C again stops at once")
    text = console.export_text()
    assert "learner | WARNING a group came twice" in text
    assert "step 2/40" in text
    assert "finishing the step" in text


# --- plain lines


def test_a_step_line_says_what_matters() -> None:
    line = step_line(metrics_rows([0.5, 0.5, 0.5, 0.5, 0.5, 0.75]), steps=40)
    assert line.startswith("step  6/40  reward 0.750  mean5 0.550  correct 75%  wrong 25%  idle groups 3/16  ")
    assert line.endswith("left 1:08")


def test_a_short_run_prints_every_step_and_a_long_one_about_fifty() -> None:
    def printed(steps: int, pace_s: float) -> int:
        pace = Pace(steps)
        return sum(pace.due(step, pace_s * step) for step in range(1, steps + 1))

    assert printed(40, 1.0) == 40
    assert 50 <= printed(5000, 0.1) <= 55
    assert printed(5000, 60.0) == 5000


def test_plain_lines_come_once_a_step_and_not_for_an_earlier_session(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    append_rows(run.metrics, metrics_rows([0.5]))
    console = recorded()
    with PlainScreen(console, run, 40, verbose=False) as plain:
        plain.tick()
        append_rows(run.metrics, [metrics_row(2, 0.6), metrics_row(3, 0.7)])
        assert plain.tick() == 3
        plain.tick()
    lines = console.export_text().splitlines()
    assert [line[:10] for line in lines] == ["step  2/40", "step  3/40"]


def test_plain_lines_show_warnings_always_and_all_lines_if_asked(tmp_path: Path) -> None:
    for verbose, expected in (
        (False, ["actor0 | WARNING slow", "note"]),
        (True, ["actor0 | hello", "actor0 | WARNING slow", "note"]),
    ):
        console = recorded()
        with PlainScreen(console, RunDir(tmp_path), 40, verbose=verbose) as plain:
            plain.log_line("actor0", "hello")
            plain.log_line("actor0", "WARNING slow")
            plain.note("note")
            plain.tick()
        assert console.export_text().splitlines() == expected


@pytest.mark.parametrize("terminal", [True, False])
def test_a_log_line_cannot_command_the_terminal(tmp_path: Path, terminal: bool) -> None:
    """A scoring worker may print what a model wrote."""
    console = recorded(terminal=terminal)
    with make_screen(console, RunDir(tmp_path), 40, verbose=not terminal) as screen:
        screen.log_line("actor0", "WARNING \x1b]52;c;ZXZpbA==\x07")
        screen.log_line("actor0", "\x1b]0;title\x07")
        screen.note("\x1b]0;note\x07")
        screen.tick()
    text = console.export_text(styles=False)
    assert "\x1b]" not in text and "\\x1b]52;c;ZXZpbA==\\x07" in text


def test_while_nothing_ends_the_last_words_come_now_and_then(tmp_path: Path) -> None:
    now = [0.0]
    console = recorded()
    with PlainScreen(console, RunDir(tmp_path), 40, verbose=False, now=lambda: now[0]) as plain:
        for second in range(25):
            now[0] = float(second)
            plain.log_line("learner", f"base evaluation {second}")
            plain.tick()
    assert console.export_text().splitlines() == ["learner | base evaluation 10", "learner | base evaluation 20"]


def test_a_terminal_gets_the_picture_anything_else_gets_lines(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert isinstance(make_screen(recorded(terminal=True), run, 40, verbose=False), LiveScreen)
    assert isinstance(make_screen(recorded(terminal=True), run, 40, verbose=True), PlainScreen)
    assert isinstance(make_screen(recorded(), run, 40, verbose=False), PlainScreen)


def test_loud_and_bare() -> None:
    assert loud("2026-01-02 03:04:05,678 WARNING slow")
    assert loud("error: there is no model")
    assert not loud("an ERRORLESS step")
    assert bare("learner", "2026-01-02 03:04:05,678 INFO step 3") == "step 3"
    assert bare("learner", "2026-01-02 03:04:05,678 learner step 3") == "step 3"
    assert bare("learner", "step 3") == "step 3"


@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
def test_a_stream_that_the_caller_closed_is_no_error(tmp_path: Path, closed: str) -> None:
    run = RunDir.create(tmp_path / "run", config_to_json(Config()), min_free_bytes=0)
    argv = ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-m", "launch", "why", str(run.path)]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
