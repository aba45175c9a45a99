"""What a benchmark finds in its work folder: runs of the same settings, and of no others."""

import json
from pathlib import Path

import pytest

from benchmarks.level_runs import PROBLEMS, kept, measured, work_folder

SETTINGS = {"optimizer.lr": "2e-3", "tasks.levels": (1, 3)}


def never() -> None:
    raise AssertionError("measured again")


def test_what_was_measured_is_not_measured_again(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    assert kept(file, SETTINGS, lambda: {"seconds": 3.5}) == {"seconds": 3.5}
    assert kept(file, SETTINGS, never) == {"seconds": 3.5}


def test_a_run_of_other_settings_is_refused(tmp_path: Path) -> None:
    found = {"seconds": [1.0], "rows": [], "judged": []}
    settings = {**SETTINGS, "levels": [3], "problems": PROBLEMS}
    file = tmp_path / "shuffled-0.json"
    file.write_text(json.dumps({"settings": settings, "found": found}))
    assert measured(tmp_path, "shuffled-0", SETTINGS, [3]) == found
    with pytest.raises(SystemExit) as refused:
        measured(tmp_path, "shuffled-0", SETTINGS | {"optimizer.lr": "9e-9"}, [3])
    assert str(refused.value) == (
        f"{file} is of a run with optimizer.lr=2e-3, and this call has optimizer.lr=9e-9: give it another --work folder"
    )
    with pytest.raises(SystemExit, match=r"levels=\[3\], and this call has levels=\[1, 3\]"):
        measured(tmp_path, "shuffled-0", SETTINGS, [1, 3])
    with pytest.raises(SystemExit, match=r"curriculum\.ewc=None, and this call has curriculum\.ewc=0\.1"):
        measured(tmp_path, "shuffled-0", SETTINGS | {"curriculum.ewc": 0.1}, [3])


def test_only_a_folder_that_was_given_stays(tmp_path: Path) -> None:
    with work_folder(tmp_path / "new" / "work") as given, work_folder(None) as own:
        assert given.is_dir() and own.is_dir()
    assert given.is_dir() and not own.exists()
