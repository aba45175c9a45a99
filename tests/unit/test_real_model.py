"""The benchmark of a pretrained model: what it says about two evaluations, and the picture of the curves."""

import argparse
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from benchmarks.curves import HEIGHT, LEFT, TOP, WIDTH, ceiling, picture, running_means
from benchmarks.real_model import compared, has_ended, label_of, note_settings, overrides, trained_s
from shared.run.run_dir import RunDir
from shared.run.summary import Status, Summary, write_summary
from shared.statistics import paired
from tests.support.fakes import toy_evaluation

SVG = "{http://www.w3.org/2000/svg}"


def test_a_gain_is_paired_by_problem() -> None:
    before, after = [i % 3 == 0 for i in range(90)], [i % 3 != 1 for i in range(90)]
    found = compared(toy_evaluation(before), toy_evaluation(after))["greedy"]
    expected = paired([float(x) for x in after], [float(x) for x in before], 0.975)
    assert (found["before"]["accuracy"], found["after"]["accuracy"]) == (0.3333, 0.6667)
    assert (found["gain"]["mean"], found["gain"]["certain"]) == (0.3333, True)
    assert (found["gain"]["low"], found["gain"]["high"]) == (round(expected.low, 4), round(expected.high, 4))
    label = label_of({"seed": 2, "problems": 90, "greedy": found})
    assert label.startswith("seed 2: greedy 33% to 67% of 90, gain 33 points (")


def test_evaluations_of_different_problems_are_refused() -> None:
    with pytest.raises(SystemExit, match="different problems"):
        compared(toy_evaluation([True], tasks_sha256="a"), toy_evaluation([True], tasks_sha256="b"))


def test_a_number_of_minutes_leaves_the_number_of_steps_open() -> None:
    given = {"preset": "embedded", "model": Path("m"), "set": ["run.steps=7"]}
    assert overrides(3, argparse.Namespace(minutes=None, **given))[-1] == "run.steps=7"
    keys = overrides(3, argparse.Namespace(minutes=1.0, **(given | {"set": []})))
    assert {"run.seed=3", "model.path=m", "run.steps=5000"} <= set(keys)


def test_the_time_of_a_run_is_that_of_its_whole_lines(tmp_path: Path) -> None:
    assert trained_s(tmp_path) == 0.0
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text('{"time_s": 7.0, "time/step_s": 2.0}\n{"time_s": 10.0, "time/step_s": 3.0}\n{"time_')
    assert trained_s(tmp_path) == 5.0


def test_only_a_run_that_has_ended_is_not_trained_again(tmp_path: Path) -> None:
    assert not has_ended(tmp_path / "none")
    run = RunDir.create(tmp_path / "run", b"{}")
    assert not has_ended(run.path), "killed before its first summary"
    statuses: tuple[Status, ...] = ("running", "stopped", "done")
    found = []
    for status in statuses:
        write_summary(run, Summary(status=status, steps=8, wall_s=1.0, adapter_sha256="ab" * 32))
        found.append(has_ended(run.path))
    assert found == [False, True, True]


def test_a_run_of_a_work_folder_must_have_the_settings_of_the_call(tmp_path: Path) -> None:
    given = {"preset": "embedded", "model": Path("m"), "set": ["optimizer.lr=1e-3"], "minutes": None}
    out = tmp_path / "0"
    note_settings(out, argparse.Namespace(**given))
    RunDir.create(out, b"{}")
    note_settings(out, argparse.Namespace(**given | {"model": Path("m").resolve()}))
    for key, other in {"preset": "cpu_05b", "model": Path("n"), "set": [], "minutes": 5.0}.items():
        with pytest.raises(SystemExit, match=f"0.json is of a run with {key}=.*another --work folder"):
            note_settings(out, argparse.Namespace(**given | {key: other}))


def test_a_run_whose_settings_nobody_noted_is_refused(tmp_path: Path) -> None:
    RunDir.create(tmp_path / "0", b"{}")
    with pytest.raises(SystemExit, match=r"preset=None, .* and this call has preset=embedded"):
        args = argparse.Namespace(preset="embedded", model=Path("m"), set=[], minutes=None)
        note_settings(tmp_path / "0", args)


def test_the_picture_has_two_lines_for_each_run_inside_its_axes() -> None:
    curves = {"seed 0": [0.1, 0.2, 0.3, 0.4, 0.5, 0.6], "seed <1>": [-0.07, 0.85]}
    root = ElementTree.fromstring(picture("title", "step", curves))
    lines = [line.attrib["points"].split() for line in root.iter(f"{SVG}polyline")]
    assert [len(points) for points in lines] == [6, 2, 2, 1]
    for points in lines:
        for x, y in (map(float, point.split(",")) for point in points):
            assert LEFT <= x <= LEFT + WIDTH and TOP <= y <= TOP + HEIGHT
    assert "seed <1>" in [text.text for text in root.iter(f"{SVG}text")]


def test_the_vertical_axis_ends_at_a_round_number() -> None:
    assert [ceiling(value) for value in (0.0, 0.07, 0.31, 0.85, 1.0, 7.2)] == pytest.approx([1, 0.08, 0.4, 1, 1, 8])
    assert running_means([1.0, 2.0]) == [1.5] and running_means([0.0] * 5 + [5.0]) == [0.0, 1.0]
