"""What the page is told of runs: all of them, one as curves, its groups, answers and tokens, and how two differ."""

import json
import math
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

pytest.importorskip("starlette", reason="needs the extra `ui`")
pytest.importorskip("uvicorn", reason="needs the extra `ui`")

from launch.display.page.tokens import cells_of
from launch.ui.group_rows import answer_row
from launch.ui.monitor import shortened
from shared.run.evaluation import write_evaluation
from shared.run.files import LineLog
from shared.run.metrics import MetricsLog
from shared.run.run_dir import RunDir
from tests.support.planted_runs import LEARNS, made_up, step_of
from tests.support.window import Window, window
from tests.support.window_runs import SCRIPT, evaluation, hacked_run, log_groups, long_run, usual_groups, usual_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs = tmp_path_factory.mktemp("runs")
    usual_run(runs / "first")
    usual_run(runs / "second", right=60, reward_mean=(0.5, 0.7))
    hacked_run(runs / "hacked")
    long_run(runs / "long", steps=2000)
    return runs


@pytest.fixture(scope="module")
def page(folder: Path) -> Iterator[Window]:
    with window(folder) as opened:
        yield opened


def test_all_runs_with_what_they_are_doing(page: Window) -> None:
    found = {run["name"]: run for run in page.ask("runs")["runs"]}
    assert set(found) == {"first", "second", "hacked", "long"}
    first = found["first"]
    assert (first["status"], first["steps"], first["planned"], first["model"], first["tasks"]) == (
        *("done", 12, 12),
        *("embedded", "embedded"),
    )
    assert len(first["curve"]) == 12 and first["reward"] == pytest.approx(first["curve"][-1])
    assert len(found["long"]["curve"]) == 60


def test_a_question_with_the_stamp_of_the_last_answer_is_answered_by_it(page: Window) -> None:
    for path in ("runs", "runs/first/overview", "runs/first/steps"):
        stamp = page.ask(path)["stamp"]
        assert page.ask(f"{path}?stamp={stamp}") == {"stamp": stamp}
        assert len(page.ask(f"{path}?stamp=another")) > 1


def test_a_step_more_changes_the_stamp_and_is_told(tmp_path: Path) -> None:
    run = made_up(tmp_path / "going", steps=8)
    with window(tmp_path) as opened:
        before = {path: opened.ask(path)["stamp"] for path in ("runs", "runs/going/overview", "runs/going/steps")}
        MetricsLog(LineLog(run.metrics)).log(step_of(9, 9, {"reward_mean": 0.97}))
        log_groups(run, usual_groups(9))
        after = {path: opened.ask(f"{path}?stamp={stamp}") for path, stamp in before.items()}
        assert after["runs"]["runs"][0]["steps"] == 9
        assert after["runs/going/overview"]["steps"] == 9
        assert after["runs/going/steps"]["steps"] == [9]


def test_what_happens_later_is_told(tmp_path: Path) -> None:
    run = made_up(tmp_path / "going", steps=8)
    with window(tmp_path) as opened:

        def happened() -> tuple[int, int, list[str]]:
            found = opened.ask("runs/going/overview")
            return found["planned"], len(found["evaluations"]), [event["kind"] for event in found["events"]]

        planned, evaluations, kinds = happened()
        assert (evaluations, kinds) == (0, [])
        write_evaluation(run.eval, evaluation("base", 0, [True, False]))
        assert happened() == (planned, 1, ["evaluation"])
        config = msgspec.json.decode(run.config.read_bytes())
        config["run"]["steps"] = planned + 5
        run.config.write_bytes(msgspec.json.encode(config))
        MetricsLog(LineLog(run.metrics)).log(msgspec.structs.replace(step_of(9, 9, {}), curriculum_stage=1))
        assert happened() == (planned + 5, 1, ["evaluation", "stage"])
        (run.logs / "supervisor.log").write_text("2026-01-02 03:04:05 after step 9: actor0 died; starting it again\n")
        assert happened() == (planned + 5, 1, ["evaluation", "stage", "restart"])


def test_a_run_whose_learner_is_gone_is_dead(tmp_path: Path) -> None:
    run = made_up(tmp_path / "killed", steps=8, status="running")
    with window(tmp_path) as opened:
        assert opened.ask("runs")["runs"][0]["status"] == "dead"
        with run.locked():
            assert opened.ask("runs")["runs"][0]["status"] == "running"


def test_the_verdict_comes_with_its_evidence_and_the_answers_that_show_it(page: Window) -> None:
    verdict = page.ask("runs/hacked/why")["verdicts"][0]
    found = page.ask("runs/hacked/overview")
    assert verdict["name"] == "reward and outcome disagree" and verdict["fault"]
    assert "held-out" in verdict["evidence"] or "right completions fell" in verdict["evidence"]
    assert verdict["look"] == {"outcome": "wrong", "sort": "reward"}
    assert found["last_logged"] == 24
    assert [one["label"] for one in found["evaluations"]] == ["base", "final"]
    base = found["evaluations"][0]["ways"]["greedy"]
    assert base["low"] < base["value"] == 40 / 64 < base["high"]


def test_time_and_energy_of_a_point_of_reward(page: Window) -> None:
    """Twelve steps of 0.93 s; the reward rises by 0.25."""
    found = page.ask("runs/first/overview")["spent"]
    assert found["seconds"]["step"] == pytest.approx(12 * 0.93)
    assert 20 < found["points"] < 30
    assert found["seconds_per_point"]["update"] == pytest.approx(12 * 0.4 / found["points"], abs=1e-6)
    assert page.ask("runs/hacked/overview")["spent"]["points"] > 50, "whatever the reward is worth"


def test_curves_are_thinned_and_lose_no_peak(page: Window) -> None:
    found = page.ask("runs/long/curves?points=100&keys=grad_norm,reward/mean")
    assert (found["first"], found["last"], len(found["steps"])) == (1, 2000, 100)
    assert set(found["keys"]) == {"grad_norm", "reward/mean"}
    assert max(found["keys"]["grad_norm"]["high"]) == 50.0 > max(found["keys"]["grad_norm"]["mean"])


def test_a_zoom_shows_its_steps_alone(page: Window) -> None:
    found = page.ask("runs/long/curves?first=660&last=670&keys=grad_norm")
    assert found["steps"] == list(range(660, 671))
    assert found["keys"]["grad_norm"]["mean"][6] == 50.0


def test_lanes_have_both_processes(page: Window) -> None:
    found = page.ask("runs/first/lanes?first=3&last=5")
    assert {phase["process"] for phase in found["phases"]} >= {"learner"}
    assert all(phase["end_s"] >= phase["start_s"] for phase in found["phases"])


def write_trace(run: RunDir, *numbers: int) -> None:
    """Of the learner, in these steps; it loads first."""
    spans = [("load", -5.0, -1.0), *(("update", float(number), number + update_s(number)) for number in numbers)]
    events = [
        {"ph": kind, "name": name, "pid": 1, "ts": at * 1e6}
        for name, *span in spans
        for kind, at in zip("BE", span, strict=True)
    ]
    run.trace_of("learner").write_text("".join(["[\n", *(f"{json.dumps(event)},\n" for event in events)]))


def update_s(step: int) -> float:
    """No two steps last as long."""
    return 0.4 + 0.01 * step


def test_lanes_are_as_traced_from_the_first_step_on(tmp_path: Path) -> None:
    run = made_up(tmp_path / "traced", steps=20, status="done", update_s=update_s)
    write_trace(run, *range(1, 21))
    with window(tmp_path) as opened:
        found = opened.ask("runs/traced/lanes")
        assert (found["first"], found["last"], found["measured"]) == (1, 20, True)
        assert [phase["name"] for phase in found["phases"]] == ["load", *20 * ["update"]]
        found = opened.ask("runs/traced/lanes?first=3&last=5")
        assert found["measured"] and [phase["start_s"] for phase in found["phases"]] == [3.0, 4.0, 5.0]


def test_lanes_of_steps_without_a_trace_are_from_their_times(tmp_path: Path) -> None:
    """The run was resumed, first without --trace, then with it."""
    run = made_up(tmp_path / "resumed", steps=60, status="done", update_s=update_s)
    with window(tmp_path) as opened:
        write_trace(run, *range(1, 41))
        found = opened.ask("runs/resumed/lanes?first=37&last=60")
        assert not found["measured"] and {phase["step"] for phase in found["phases"]} == set(range(37, 61))
        write_trace(run, *range(1, 41), *range(51, 61))
        assert opened.ask("runs/resumed/lanes?first=51&last=60")["measured"]
        assert not opened.ask("runs/resumed/lanes?first=50&last=60")["measured"]


def test_a_run_without_a_step_is_shown(tmp_path: Path) -> None:
    made_up(tmp_path / "new", steps=2)
    (tmp_path / "new" / "metrics.jsonl").unlink()
    with window(tmp_path) as opened:
        assert opened.ask("runs")["runs"][0]["steps"] == 0
        assert opened.ask("runs/new/overview")["steps"] == 0
        assert opened.ask("runs/new/curves")["steps"] == []
        assert opened.ask("runs/new/lanes")["phases"] == []
        assert opened.ask("runs/new/steps")["steps"] == []


def test_a_damaged_run_is_shown_with_its_problem_and_hides_no_other(tmp_path: Path) -> None:
    usual_run(tmp_path / "good")
    bad = usual_run(tmp_path / "bad")
    bad.config.write_text("{")
    with window(tmp_path) as opened:
        found = {run["name"]: run for run in opened.ask("runs")["runs"]}
        assert found["bad"]["status"] == "damaged" and "config.json" in found["bad"]["problem"]
        assert found["good"]["status"] == "done"
        assert "config.json" in opened.get("/api/runs/bad/overview").problem


def test_damaged_lines_are_counted_and_the_others_shown(tmp_path: Path) -> None:
    run = usual_run(tmp_path / "torn")
    for path in (run.metrics, run.rollouts):
        path.write_bytes(path.read_bytes() + b"\x00" * 100 + b"\n" + b'{"torn')
    with window(tmp_path) as opened:
        found = opened.ask("runs/torn/overview")
        assert found["damaged"] == {"metrics.jsonl": 1, "rollouts.jsonl": 1}
        assert found["steps"] == 12 and len(opened.ask("runs/torn/steps")["steps"]) == 12


def test_the_groups_of_a_step_idle_and_quarantined_ones_too(page: Window) -> None:
    groups = page.ask("runs/first/steps/5")["groups"]
    assert [group["fate"] for group in groups] == ["trained", "idle", "quarantined"]
    assert [group["stale"] for group in groups] == [0, 0, 2]
    assert groups[0]["outcomes"] == ["correct", "wrong", "truncated"]
    assert groups[0]["spread"] == pytest.approx(0.4249, abs=1e-3)
    assert "9 boxes" in groups[0]["prompt"]
    assert groups[1]["advantages"] == [None, None, None]


def test_the_answers_of_a_group_with_their_parts(page: Window) -> None:
    found = page.ask("runs/first/steps/5/0")
    right, wrong, cut = found["answers"]
    assert found["answer"] == "54" and found["prompt"].startswith("user\n")
    assert (right["outcome"], right["advantage"], right["rewards"]["verifier"]) == ("correct", 0.7, 1.0)
    assert SCRIPT in wrong["text"]
    assert cut["finish"] == "length"
    assert page.ask("runs/first/steps/5/2")["answers"][0]["turns"] == 3


def test_the_tokens_of_an_answer_with_their_figures(page: Window) -> None:
    found = page.ask("runs/first/steps/5/0/0")
    count = len(found["pieces"])
    assert found["pieces"][-1] == "<|im_end|>" and "".join(found["pieces"][:-1]) == "6 * 9 = 54 at step 5"
    assert set(found["values"]) == {"entropy", "mask", "ratio", "mismatch", "advantage", "actor", "learner"}
    assert all(len(values) == count for values in found["values"].values())
    assert found["values"]["mismatch"][0] == pytest.approx(2e-6)
    assert found["values"]["ratio"][4] == pytest.approx(1.000002)
    assert found["values"]["advantage"][:2] == [0.0, 0.7]
    idle = page.ask("runs/first/steps/5/1/0")["values"]
    assert idle["mask"] is None and idle["ratio"] is None and idle["entropy"] is not None


def test_an_answer_that_no_actor_wrote_has_the_probability_of_the_learner() -> None:
    (found, *_) = usual_groups(1)
    nothing, written = [None] * len(found.samples[0].ids), [-0.25] * len(found.samples[0].ids)
    one = msgspec.structs.replace(found.samples[0], logprob=nothing, gap=None, written=written)
    values = answer_row(msgspec.structs.replace(found, samples=(one,)), 0, 0)["values"]
    assert values["actor"] is values["ratio"] is values["mismatch"] is None and values["learner"] == written
    assert next(cells_of(one)).title.startswith("log-prob -0.25, entropy")


def test_what_an_environment_wrote_has_no_probability(page: Window) -> None:
    values = page.ask("runs/first/steps/5/2/0")["values"]
    for name in ("actor", "entropy"):
        assert [value is None for value in values[name]] == [False, False, True, False, False]


def test_the_same_task_in_all_steps(page: Window) -> None:
    task = page.ask("runs/first/steps/5")["groups"][1]["task"]
    found = page.ask(f"runs/first/task?task={task}")["groups"]
    assert [(group["step"], group["group"]) for group in found] == [(step, 1) for step in range(1, 13)]
    assert "expected 16 hex digits" in page.get("/api/runs/first/task?task=../..").problem


def test_a_text_is_found_wherever_it_is(page: Window) -> None:
    (hit,) = page.ask("runs/first/search?text=AT%20STEP%207")["hits"]
    assert (hit["step"], hit["group"], hit["sample"]) == (7, 0, 0)
    assert {hit["sample"] for hit in page.ask("runs/first/search?text=9%20boxes")["hits"]} == {None}
    assert page.ask("runs/first/search?text=nowhere")["hits"] == []
    assert "text got nothing" in page.get("/api/runs/first/search?text=%20").problem


def test_a_search_ends_early_and_says_where_to_go_on(page: Window) -> None:
    found = page.ask("runs/long/search?text=pens")
    assert len(found["hits"]) >= 60 and found["next"]
    rest = page.ask(f"runs/long/search?text=pens&first={found['next']}")
    assert rest["hits"][0]["step"] >= found["next"] > found["hits"][-1]["step"]


def test_a_damaged_group_is_left_out_and_the_others_keep_their_numbers(tmp_path: Path) -> None:
    run = usual_run(tmp_path / "torn", steps=8)
    lines = run.rollouts.read_bytes().splitlines(keepends=True)
    # The first group of step 5; its beginning is whole.
    lines[12] = lines[12][:200] + b"\x00" * (len(lines[12]) - 201) + b"\n"
    run.rollouts.write_bytes(b"".join(lines))
    with window(tmp_path) as opened:
        groups = opened.ask("runs/torn/steps/5")["groups"]
        assert [(group["group"], group["fate"]) for group in groups] == [(1, "idle"), (2, "quarantined")]
        assert opened.ask("runs/torn/steps/5/1")["id"] == groups[0]["id"]
        assert "or it is damaged" in opened.get("/api/runs/torn/steps/5/0").problem
        assert len(opened.ask(f"runs/torn/task?task={groups[0]['task']}")["groups"]) == 8


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("steps/99", "Step 99 has no groups"),
        ("steps/5/9", "Step 5 has no group 9"),
        ("steps/5/0/9", "there is no answer 9"),
        ("steps/x", "step got 'x', expected a whole number"),
        ("steps/5/-1", "group got '-1', expected a whole number"),
        ("steps/5/0/1e9", "sample got '1e9', expected a whole number"),
    ],
)
def test_what_is_not_there_is_said_in_a_sentence(page: Window, path: str, sentence: str) -> None:
    answer = page.get(f"/api/runs/first/{path}")
    assert answer.status in (400, 404) and sentence in answer.problem


def test_two_runs_differ_in_keys_accuracy_and_answers(page: Window) -> None:
    found = page.ask("compare?runs=first/second")
    (pair,) = found["pairs"]
    greedy = pair["ways"][0]
    assert (greedy["a"], greedy["b"]) == (40 / 64, 60 / 64)
    assert greedy["mean"] == pytest.approx(-20 / 64) and greedy["high"] < 0 and greedy["certain"]
    assert (pair["lost"], pair["won"]) == (0, 20)
    assert {task["better"] for task in pair["changed"]} == {"b"}
    assert found["differences"] == []
    steps = {one["key"]: one["values"] for one in page.ask("compare?runs=first/long")["differences"]}
    assert steps["run.steps"] == [12, 2000]


def test_runs_that_cannot_be_compared_say_why(page: Window) -> None:
    found = page.ask("compare?runs=first/long")
    assert "has no evaluation 'final'" in found["pairs"][0]["problem"]
    for names in ("first", "first/first", "first/second/hacked/long/fifth", ""):
        assert "expected 2 to 4" in page.get(f"/api/compare?runs={names}").problem


def test_nothing_is_written(folder: Path, page: Window) -> None:
    def state() -> dict[Path, tuple[int, int]]:
        return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in folder.rglob("*")}

    before = state()
    for path in (
        "runs",
        "runs/first/overview",
        "runs/first/lanes",
        "runs/first/search?text=a",
        "compare?runs=first/second",
    ):
        page.ask(path)
    assert state() == before


def test_a_run_that_appears_or_goes_is_noticed(tmp_path: Path) -> None:
    usual_run(tmp_path / "first")
    with window(tmp_path) as opened:
        assert names_of(opened) == {"first"}
        usual_run(tmp_path / "second")
        assert names_of(opened) == {"first", "second"}
        shutil.rmtree(tmp_path / "first")
        assert names_of(opened) == {"second"}
        assert opened.get("/api/runs/first/overview").status == 404


def names_of(opened: Window) -> set[str]:
    return {run["name"] for run in opened.ask("runs")["runs"]}


def test_a_run_that_was_cut_back_is_read_again(tmp_path: Path) -> None:
    run = usual_run(tmp_path / "first")
    with window(tmp_path) as opened:
        assert opened.ask("runs/first/overview")["steps"] == 12
        cut_back(run, 5)
        assert opened.ask("runs/first/overview")["steps"] == 4
        assert opened.ask("runs/first/steps")["steps"] == [1, 2, 3, 4]


def cut_back(run: RunDir, step: int) -> None:
    for path in (run.metrics, run.rollouts):
        log = LineLog(path)
        log.truncate_from(step)
        log.close()


def test_figures_that_were_not_measured_are_null(tmp_path: Path) -> None:
    assert "kl" not in LEARNS
    usual_run(tmp_path / "first")
    with window(tmp_path) as opened:
        found: dict[str, Any] = opened.ask("runs/first/curves?keys=kl")
        assert set(found["keys"]["kl"]["mean"]) == {None}
    assert os.listdir(tmp_path) == ["first"]


def test_a_chart_has_five_digits_of_any_value() -> None:
    draw = random.Random(0)
    values = [draw.choice((-1, 1)) * 10 ** draw.uniform(-12, 12) for _ in range(2000)]
    values += [0.0, 1.0, 0.3, 99999.5, 123456.0, 1e300, -1e-300]
    (short,) = shortened(np.array([values]))
    assert short == [float(f"{value:.5g}") for value in values]
    assert math.isnan(shortened(np.array([[math.nan, 1.0]]))[0][0])
