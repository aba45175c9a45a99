"""Where commands write. `--out FILE`: a file gets its name by a rename, so what is there is replaced; what must stay is
refused first. `eval`: into the run, or nothing is computed."""

import os
from pathlib import Path

import pytest

from launch.__main__ import main
from launch.cli import parse
from shared.errors import UserError


def refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(argv) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("where", ["/dev/stdout", "/dev/fd/1", "pipe", "link-to-pipe", "circle"])
def test_out_is_no_device_and_no_pipe(where: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link-to-pipe").symlink_to("pipe")
    (tmp_path / "circle").symlink_to("circle")
    # Parsed only: what `verify` would do to a device is what must not happen.
    with pytest.raises(UserError, match=r"expected a regular file; name one, or omit --out"):
        parse(["generate", "--prompt", "x", "--out", str(tmp_path / where)])


def test_out_that_is_empty_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert "got '', expected a file in an existing folder" in refused(
        ["generate", "--prompt", "x", "--out", ""], capsys
    )


def test_out_is_written_through_a_symlink(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to("elsewhere/file")
    (tmp_path / "in").write_text('{"id": 1, "completion": "#### 18", "answer": "18"}')
    assert main(["verify", "--in", str(tmp_path / "in"), "--out", str(tmp_path / "link")]) == 0
    assert (tmp_path / "link").is_symlink()
    assert "correct" in (tmp_path / "elsewhere" / "file").read_text()


@pytest.mark.parametrize("command", ["verify", "generate"])
def test_out_does_not_replace_what_is_read(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "in"
    file.write_text('{"id": 1, "completion": "#### 18", "answer": "18"}')
    (tmp_path / "link").symlink_to("in")
    before = file.read_bytes()
    for out in (file, tmp_path / "link"):
        assert "is the file that --in names" in refused([command, "--in", str(file), "--out", str(out)], capsys)
    assert file.read_bytes() == before


def test_out_replaces_no_file_of_a_run_but_its_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    assert main(["run", "--prepare", "--out", str(run)]) == 0
    capsys.readouterr()
    before = (run / "config.json").read_bytes()
    (tmp_path / "in").write_text('{"id": 1, "completion": "#### 18", "answer": "18"}')
    (tmp_path / "link").symlink_to("run/config.json")
    for out in (run / "config.json", run / "lease" / ".." / "config.json", tmp_path / "link"):
        assert f"is in the run directory {run}" in refused(["report", str(run), "--out", str(out)], capsys)
        assert "is in the run directory" in refused(["verify", "--in", str(tmp_path / "in"), "--out", str(out)], capsys)
    assert (run / "config.json").read_bytes() == before
    for out in (run / "report.html", run / "report.html", run / "new.html"):
        assert main(["report", str(run), "--out", str(out)]) == 0


def test_eval_computes_nothing_for_a_run_that_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert main(["run", "--prepare", "--out", str(out)]) == 0
    (out / "eval").rmdir()
    (out / "eval").write_text("")
    said = refused(["eval", str(out), "--base"], capsys)
    assert f"{out / 'eval'} cannot be used" in said and "choose a run directory" in said
