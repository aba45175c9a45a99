"""`report`: one HTML page without a script and without a request, whatever was written into an answer."""

import os
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from launch.display.page.charts import LEFT, TOP, WIDTH, chart, limits, points
from launch.display.page.command import rendered, report, write_report
from launch.display.page.tokens import CELLS, ENDS, SAMPLES, answer, chosen_groups
from shared.config.load import config_to_json
from shared.config.tree import Config, RunConfig
from shared.run import Run
from shared.run.evaluation import write_evaluation
from shared.run.files import LineLog
from shared.run.rollout_index import RolloutIndex
from shared.run.run_dir import RunDir
from tests.support.fakes import toy_evaluation
from tests.support.rollouts import rollout_group, rollout_sample, write_groups
from tests.support.run_files import metrics_row, write_run

ROOT = Path(__file__).resolve().parents[3]
HOSTILE = (
    "</pre><script>alert(1)</script> <img src=x onerror=alert(2)> \x1b[2J \x00 ' onclick='a \" ]]> {{ 7 * 7 }} &lt;"
)
VOID = {"meta", "input", "path", "br", "img"}


class Parsed(HTMLParser):
    """Tags, attributes and texts of a page; fails where tags are not closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.texts: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())


def made(path: Path, steps: int = 12, **config: Any) -> RunDir:
    run = RunDir.create(path, config_to_json(Config(run=RunConfig(steps=steps), **config)), min_free_bytes=0)
    write_run(run, status="done", rewards=[0.4 + 0.5 * step / steps for step in range(steps)], evaluated=[])
    for label, version, right in (("base", 0, 20), ("final", steps, 36)):
        found = toy_evaluation([index < right for index in range(40)], label=label, version=version)
        write_evaluation(run.eval, found)
    groups = [rollout_group(step, ["it is 4", "it is 5"], rewards=[1, 0]) for step in range(1, steps + 1)]
    write_groups(run.rollouts, groups)
    return run


def test_a_run_is_shown_on_one_page(tmp_path: Path) -> None:
    run = made(tmp_path / "my run")
    assert write_report(run) == run.path / "report.html"
    page = Parsed(run.report.read_text())
    for words in (
        *(
            "my run",
            "done, 12 of 12 steps, 1:02",
            "finished:",
            "Curves",
            "Reward",
            "Held-out accuracy",
            "in pairs: +40.0",
        ),
        # From 0.483 to 0.775 in twelve steps of 2 s, half of them decoding.
        *("points of reward 29.2", "rollout 12 s 0.41 s", "step 24 s 0.82 s"),
        *("50.0 % (35.2 to 64.8)", "run.steps", "sha256 abab", "launch replay", "12 groups of 12 steps", "evaluation"),
        *("Step 1, group 0: early", "advantage 0.5", "it is 4", "gold answer: 42", "bitsandbytes"),
    ):
        assert words.replace("finished:", "finished") in page.text, words
    assert page.tags.count("h1") == 1 and ("lang", "en") in page.attributes
    assert page.tags.count("svg") >= 6


def test_a_name_that_the_output_cannot_spell_is_written_as_an_escape(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "launch", "report", str(made(tmp_path / "run").path), "--out", "\u00fc.html"]
    environment = os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONPATH": str(ROOT), "LC_ALL": "C.UTF-8"}
    done = subprocess.run(argv, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\\xfc.html" in done.stdout and (tmp_path / "\u00fc.html").is_file()


def test_nothing_is_loaded_and_nothing_can_run(tmp_path: Path) -> None:
    """Texts of the model, of the data, of rewards and of logs are shown as they are."""
    run = made(tmp_path / "run")
    log = LineLog(run.metrics)
    log.append(metrics_row(13, 0.9) | {f"reward/{HOSTILE}": 1.0, f"logged/{HOSTILE}": 2.0})
    sample = rollout_sample(
        HOSTILE, 1.0, 0.5, outcome=HOSTILE, finish=HOSTILE, rewards={HOSTILE: 1.0}, extras={"x": HOSTILE}
    )
    group = rollout_group(20, ["a"], prompt=HOSTILE)
    write_groups(run.rollouts, [structs.replace(group, samples=(sample,), answer=HOSTILE, rewards=(2.0,))])
    (run.logs / "supervisor.log").write_text(f"2026-11-23 14:00:00 after step 1: {HOSTILE}\n")
    text = rendered([Run(run.path)])
    page = Parsed(text)
    assert not {"script", "img", "link", "iframe", "base", "form", "a"} & set(page.tags)
    assert not [name for name, _ in page.attributes if name.startswith("on") or name in ("src", "href", "action")]
    assert ("content", "default-src 'none'; style-src 'unsafe-inline'") in page.attributes
    assert "http://" not in text and "https://" not in text and "url(" not in text and "@import" not in text
    assert page.text.count("<script>alert(1)</script>") >= 6 and "{{ 7 * 7 }}" in page.text
    assert "\x1b" not in text and "\x00" not in text and "\\x1b[2J" in page.text


def test_of_many_events_the_last_ones_are_shown(tmp_path: Path) -> None:
    run = made(tmp_path / "run")
    text = Parsed(rendered([Run(run.path)])).text
    assert "came before" not in text
    before = len(Run(run.path).events())
    lines = [f"2026-11-23 14:00:00 after step {step}: start {step}\n" for step in range(100, 400)]
    (run.logs / "supervisor.log").write_text("".join(lines))
    text = Parsed(rendered([Run(run.path)])).text
    assert "start 399" in text and "start 200" in text and "start 199" not in text
    assert f"The last 200 events; at least {before + 100} came before." in text


def test_several_runs_are_compared_first(tmp_path: Path) -> None:
    first, second = made(tmp_path / "a"), made(tmp_path / "b", steps=9)
    out = tmp_path / "both.html"
    assert report(directories=[first.path, second.path], out=out) == 0
    page = Parsed(out.read_text())
    assert page.tags.count("h1") == 3
    assert "2 runs" in page.text and "What is configured differently key a b run.steps 12 9" in page.text
    assert "run base last a 50.0 %" in page.text
    names = {value for name, value in page.attributes if name == "name" and value.startswith("colour")}
    assert names == {"colour-1", "colour-2"}, "the colours of one run are not those of the other"


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_a_run_that_has_hardly_begun_has_a_page(rows: int, tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run", config_to_json(Config()), min_free_bytes=0)
    assert "not started" in Parsed(rendered([Run(run.path)])).text
    write_run(run, status="running", rewards=[0.5] * rows, evaluated=[])
    page = Parsed(rendered([Run(run.path)]))
    assert "killed (its learner is gone)" in page.text and "the run was killed" in page.text


def test_a_page_of_a_long_run_with_long_answers_is_small(tmp_path: Path) -> None:
    run = made(tmp_path / "run", steps=1000)
    answers = ["word " * 3000 + "end"] * 16
    late = [
        rollout_group(1001, answers, slot=slot, rewards=[*range(slot + 1), *[0.0] * (15 - slot)]) for slot in range(8)
    ]
    write_groups(run.rollouts, late)
    size = write_report(run).stat().st_size
    assert size < 5_000_000
    run.rollouts.unlink()
    assert write_report(run).stat().st_size < 700_000


def test_the_chosen_groups_are_worth_a_look(tmp_path: Path) -> None:
    groups = [rollout_group(step, ["a", "b"], rewards=[1, 0]) for step in range(1, 10)]
    flat = rollout_group(9, ["no", "no"], slot=1, rewards=[0.0, 0.0])
    long = rollout_group(8, ["x " * 90, "y"], slot=1, rewards=[0.5, 0.0])
    paid = rollout_group(7, ["hack", "y"], slot=1, rewards=[9.0, 8.9])
    refused = structs.replace(rollout_group(6, ["r", "s"], slot=1, rewards=[1, 0]), fate="quarantined")
    stale = structs.replace(rollout_group(5, ["t", "u"], slot=1, rewards=[1, 0]), version=1)
    write_groups(tmp_path / "r.jsonl", [*groups, flat, long, paid, refused, stale])
    found = {
        one.reason.split(":")[0]: (one.group.step, one.number)
        for one in chosen_groups(RolloutIndex(tmp_path / "r.jsonl"))
    }
    assert found == {
        "early": (1, 0),
        "in the middle": (5, 0),
        "late": (9, 0),
        "the best paid answer of the last steps": (7, 1),
        "the longest answer of the last steps": (8, 1),
        "a group that taught nothing": (9, 1),
        "a group whose update was refused": (6, 1),
        "sampled by an older policy": (5, 1),
    }
    assert chosen_groups(RolloutIndex(tmp_path / "none")) == []


def test_a_group_shows_its_best_and_worst_and_a_page_so_many_tokens(tmp_path: Path) -> None:
    many = [rollout_group(step, ["w " * 399] * 20, rewards=[*range(20)]) for step in (1, 2, 3, 4, 5)]
    write_groups(tmp_path / "r.jsonl", many)
    found = chosen_groups(RolloutIndex(tmp_path / "r.jsonl"))
    assert [one.number for one in found[0].answers] == [0, 1, 2, 3, 16, 17, 18, 19] and SAMPLES == 8
    assert sum(len(one.cells) for each in found for one in each.answers) <= CELLS


def test_a_token_has_the_bins_of_its_figures() -> None:
    sample = rollout_sample("a b c", 1.0, -0.5, entropy=[0.0, 0.6, None], gap=[0.5, -0.0001, None], mask=[1, 0, 1])
    cells = answer(0, sample).cells
    assert [cell.classes for cell in cells] == ["e0 m4 r4 a1 k1", "e3 m1 r2 a3 k0", "a1 k1"]
    assert cells[0].title == "log-prob -0.5, entropy 0, ratio 1.65, mismatch 0.5"
    assert [cell.text for cell in cells] == ["a", " b", " c"]


def test_a_long_answer_has_its_two_ends() -> None:
    cells = answer(0, rollout_sample(" ".join(map(str, range(1000))))).cells
    assert len(cells) == 2 * ENDS + 1 and cells[ENDS].text == f" [{1000 - 2 * ENDS} tokens left out] "
    assert (cells[0].text, cells[ENDS - 1].text, cells[-1].text) == ("0", f" {ENDS - 1}", " 999")


def test_a_curve_goes_through_its_points_and_leaves_gaps() -> None:
    drawn = chart("t", {"a": points([(1, 0.0, 0.0, 0.0), (3, 1.0, 0.5, 1.0)])})
    assert drawn.lines[0].path == f"M{LEFT:.1f} 128.0L{WIDTH - 8:.1f} {TOP:.1f}"
    assert drawn.lines[0].band.count("L") == 3 and (drawn.bottom, drawn.top, drawn.first, drawn.last) == (
        "0",
        "1",
        "1",
        "3",
    )
    gap = points([(1, 2.0, 2.0, 2.0), (2, 0.0, 0.0, 0.0), (3, 4.0, 4.0, 4.0), (4, 5.0, 5.0, 5.0)])
    gap.mean[1] = gap.low[1] = gap.high[1] = None
    (line,) = chart("t", {"a": gap}).lines
    assert line.path.count("M") == 2 and line.path.count("L") == 1 and line.band == ""


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.1, 0.9, (0.0, 1.0)),
        (0.0, 5.0, (0.0, 5.0)),
        (90.0, 100.0, (90.0, 100.0)),
        (-1.0, 2.0, (-1.0, 2.0)),
        (3.0, 3.0, (0.0, 3.0)),
    ],
)
def test_an_axis_begins_at_zero_unless_values_are_far_from_it(
    low: float, high: float, expected: tuple[float, float]
) -> None:
    assert limits(low, high) == expected
