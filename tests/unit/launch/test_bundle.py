"""The Samples page as files: the same answers as a process gives, in a bounded size."""

import errno
import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from launch.__main__ import main
from launch.ui.bundle import PAGES, STATIC, joined, spread
from launch.ui.group_rows import answer_row, group_row, head_row
from shared.run import Run
from shared.run.run_dir import RunDir
from tests.support.disk_faults import failing, list_calls
from tests.support.planted_runs import made_up
from tests.support.window_runs import SCRIPT, log_groups, sample, usual_groups, usual_run
from tests.support.window_runs import group as made_group


def value(folder: Path, name: str) -> Any:
    """What a file hands over."""
    found = re.fullmatch(r'tandem\.put\("([\w/-]+)",(.*)\);\n', (folder / "data" / f"{name}.js").read_text(), re.DOTALL)
    assert found and found[1] == name
    return json.loads(found[2])


def about(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "data" / "index.js").read_text().removeprefix("globalThis.tandem = ").rstrip(";\n"))


def as_json(record: object) -> Any:
    return json.loads(msgspec.json.encode(record))


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_files_have_what_a_process_would_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made, folder = usual_run(tmp_path / "first"), tmp_path / "shown"
    assert main(["report", str(made.path), "--bundle", str(folder)]) == 0
    log = Run(made.path).rollouts
    assert about(folder) == {"run": "first", "status": "done", "steps": list(range(1, 13)), "groups": 36}
    assert value(folder, "steps/5") == {"groups": [as_json(group_row(log.groups(5)[n], n)) for n in range(3)]}
    assert value(folder, "tokens/5-2") == [as_json(answer_row(log.groups(5)[2], 2, n)) for n in range(2)]
    task = log.heads(5)[1].task
    assert value(folder, f"tasks/{task[:2]}")[task] == as_json([head_row(head, n) for n, head in log.history(task)])
    said = capsys.readouterr().out
    assert f"{folder / 'index.html'}: 36 groups of 12 steps, {size_of(folder) / 1e6:.1f} MB" in said
    assert "did not fit" not in said


def test_the_page_asks_nobody_and_runs_nothing_else(tmp_path: Path) -> None:
    made, folder = usual_run(tmp_path / "first"), tmp_path / "shown"
    assert main(["report", str(made.path), "--bundle", str(folder)]) == 0
    page = (folder / "index.html").read_text()
    assert "default-src 'none'; script-src 'self' file:;" in page and "module" not in page
    linked = re.findall(r'(?:src|href)="([^"#]+)"', page)
    assert len(linked) >= 5 and all((folder / name).is_file() for name in linked)
    for path in folder.rglob("*.*"):
        assert "https://" not in path.read_text(), path
    assert SCRIPT not in page and "<script>" in (folder / "data" / "steps" / "5.js").read_text()


def test_the_size_is_bounded_and_steps_are_left_out_evenly(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made, folder = made_up(tmp_path / "long", steps=64, status="done"), tmp_path / "shown"
    long = [sample("six times nine " * 500, "correct", 1.0, 0.5)]
    log_groups(made, [made_group(step, 0, long) for step in range(1, 65)])
    assert main(["report", str(made.path), "--bundle", str(folder), "--megabytes", "2"]) == 0
    steps = about(folder)["steps"]
    assert 8 <= len(steps) < 64 and steps[-1] == 64 and steps[0] == 1
    gaps = [later - step for step, later in pairwise(steps)]
    assert max(gaps) <= 4 * min(gaps)
    assert size_of(folder) <= 2_000_000
    assert f"{64 - len(steps)} of 64 steps did not fit into 2 MB" in capsys.readouterr().out
    assert {path.stem for path in (folder / "data" / "steps").iterdir()} == set(map(str, steps))


def test_steps_are_taken_from_all_parts_of_a_run() -> None:
    steps = list(range(10, 90, 10))
    assert sorted(spread(steps)) == steps
    first = list(spread(steps))
    assert first[:3] == [80, 10, 50]
    assert (list(spread([7])), list(spread([7, 8]))) == ([7], [8, 7])


@pytest.mark.parametrize("case", ["two runs", "taken", "no groups", "too small", "two places"])
def test_what_cannot_be_written_is_said(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made, folder = made_up(tmp_path / "run", steps=4), tmp_path / "shown"
    words = ["report", str(made.path), "--bundle", str(folder)]
    if case != "no groups":
        log_groups(made, [one for step in (1, 2) for one in usual_groups(step)])
    if case == "too small":
        huge = [sample("word " * 40_000, "wrong", 0.0, None)]
        RunDir(made.path).rollouts.unlink()
        log_groups(made, [made_group(1, 0, huge)])
        words += ["--megabytes", "1"]
    if case == "taken":
        folder.mkdir()
        (folder / "mine").write_text("kept")
    if case == "two runs":
        words.insert(1, str(made.path))
    if case == "two places":
        words += ["--out", "x.html"]
    sentence = {
        "two runs": "expected one",
        "taken": "choose a new folder",
        "no groups": "nothing to show",
        "too small": "give more with --megabytes",
        "two places": "not allowed with",
    }[case]
    try:
        code = main(words)
    except SystemExit as exit:
        code = exit.code
    assert code == 2 and sentence in capsys.readouterr().err
    assert folder.exists() == (case == "taken"), "nothing is left behind"


@pytest.mark.parametrize(
    ("place", "sentence"),
    [("a file/x", "choose a --bundle that is not a file"), ("/proc/x", "choose another --bundle")],
)
def test_a_place_that_takes_no_folder_is_one_sentence(
    place: str, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = usual_run(tmp_path / "first")
    (tmp_path / "a file").write_text("mine")
    assert main(["report", str(made.path), "--bundle", str(tmp_path / place)]) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize("nth", [1, 20, -1], ids=["first", "middle", "last"])
def test_a_full_disk_is_one_sentence_and_leaves_a_folder_that_can_be_chosen_again(
    nth: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made, folder = usual_run(tmp_path / "first"), tmp_path / "shown"
    words = ["report", str(made.path), "--bundle", str(folder)]
    if nth < 0:
        nth = list_calls(lambda: main([*words[:-1], str(tmp_path / "counted")])).count("write")
    with failing("write", errno.ENOSPC, nth=nth):
        assert main(words) == 2
    said = capsys.readouterr().err
    assert f"{folder}/" in said and "free some space on that disk, or choose another --bundle." in said
    assert list(folder.iterdir()) == []
    assert main(words) == 0 and (folder / "index.html").is_file()


def test_the_modules_are_one_script(tmp_path: Path) -> None:
    script = joined(STATIC, "app.js", PAGES)
    assert not re.search(r"^\s*(import|export)\b", script, re.MULTILINE)
    assert script.index('modules["dom.js"] =') < script.index('modules["samples.js"] =') < script.index('"app.js"')
    assert 'modules["monitor.js"]' not in script and "const monitor = undefined;" in script
    (tmp_path / "a.js").write_text("export default 3;\n")
    with pytest.raises(ValueError, match=r"a\.js has a form of import or export .* export default 3"):
        joined(tmp_path, "a.js", ())
