"""The local endpoint: one for a run, short enough, in a folder that is ours alone."""

import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from protocol.endpoint import local_endpoint, runtime_dir
from protocol.errors import SecurityError


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A short XDG_RUNTIME_DIR; pytest's own folders may be longer than a socket's path can be."""
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield Path(folder)


def test_both_processes_find_the_same_one(session: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (tmp_path / "link").symlink_to(run)
    endpoint = local_endpoint(run)
    assert endpoint.startswith(f"ipc://{session}/tandem-")
    assert len(endpoint.removeprefix("ipc://")) <= 100
    assert endpoint == local_endpoint(tmp_path / "link") == local_endpoint(tmp_path / "x" / ".." / "run")
    assert endpoint != local_endpoint(tmp_path / "other")


def test_the_folder_is_ours_alone(session: Path, tmp_path: Path) -> None:
    local_endpoint(tmp_path)
    (folder,) = session.iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.chmod(0o755)
    with pytest.raises(SecurityError, match=f"run `chmod 700 {folder}`"):
        local_endpoint(tmp_path)


def test_something_else_in_its_place_is_refused(session: Path, tmp_path: Path) -> None:
    local_endpoint(tmp_path)
    (folder,) = session.iterdir()
    folder.rmdir()
    folder.symlink_to(tmp_path)
    with pytest.raises(SecurityError, match="is not a folder of this user"):
        local_endpoint(tmp_path)
    folder.unlink()
    folder.touch(mode=0o700)
    with pytest.raises(SecurityError, match="is not a folder of this user"):
        local_endpoint(tmp_path)


def test_a_path_that_is_too_long_is_refused(session: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = session / ("x" * 100)
    deep.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(deep))
    with pytest.raises(SecurityError, match="set XDG_RUNTIME_DIR to a folder with a shorter path"):
        local_endpoint(tmp_path)
    assert list(deep.iterdir()) == []


@pytest.mark.parametrize("value", [None, "", "/no/such/folder"])
def test_without_a_session_folder_the_temp_folder_serves(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    if value is not None:
        monkeypatch.setenv("XDG_RUNTIME_DIR", value)
    assert runtime_dir() == Path(tempfile.gettempdir())
