"""The local endpoint: one for a run, short enough, in a folder that is ours alone."""

import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from protocol.endpoint import local_endpoint, socket_path, user_folder
from protocol.errors import SecurityError


@pytest.fixture
def temp(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A short TMPDIR; pytest's own folders may be longer than a socket's path can be."""
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)


def test_both_processes_find_the_same_one(temp: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (tmp_path / "link").symlink_to(run)
    endpoint = local_endpoint(run)
    assert endpoint.startswith(f"ipc://{temp}/tandem-")
    assert len(endpoint.removeprefix("ipc://")) <= 100
    assert endpoint == local_endpoint(tmp_path / "link") == local_endpoint(tmp_path / "x" / ".." / "run")
    assert endpoint != local_endpoint(tmp_path / "other")


def test_the_folder_is_ours_alone(temp: Path, tmp_path: Path) -> None:
    local_endpoint(tmp_path)
    (folder,) = temp.iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.chmod(0o755)
    with pytest.raises(SecurityError, match=f"run `chmod 700 {folder}`"):
        local_endpoint(tmp_path)


def test_something_else_in_its_place_is_refused(temp: Path, tmp_path: Path) -> None:
    local_endpoint(tmp_path)
    (folder,) = temp.iterdir()
    folder.rmdir()
    folder.symlink_to(tmp_path)
    with pytest.raises(SecurityError, match="is not a folder of this user"):
        local_endpoint(tmp_path)
    folder.unlink()
    folder.touch(mode=0o700)
    with pytest.raises(SecurityError, match="is not a folder of this user"):
        local_endpoint(tmp_path)


def test_a_folder_that_inherits_the_setgid_bit_is_closed_to_others_too(temp: Path, tmp_path: Path) -> None:
    """As scratch folders of a group on clusters have it."""
    temp.chmod(0o2700)
    assert local_endpoint(tmp_path) == local_endpoint(tmp_path)
    (folder,) = temp.iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o2700


def test_a_folder_whose_path_is_too_long_for_sockets_is_not_used(
    temp: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = temp / ("x" * 100)
    deep.mkdir()
    monkeypatch.setenv("TMPDIR", str(deep))
    assert socket_path(tmp_path).parent == Path(f"/tmp/tandem-{os.getuid()}")
    assert user_folder().parent == deep, "for files it is long enough"


def test_a_place_where_nothing_can_be_made_is_refused(
    temp: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nobody, root included, can make a folder there.
    monkeypatch.setenv("TMPDIR", "/proc/self/fd")
    with pytest.raises(SecurityError, match=r"cannot be made .*; set TMPDIR to a folder you can write to"):
        local_endpoint(tmp_path)


@pytest.mark.parametrize("value", [None, "", "/no/such/folder"])
def test_without_a_temp_folder_it_is_the_one_of_the_system(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TMPDIR", raising=False)
    if value is not None:
        monkeypatch.setenv("TMPDIR", value)
    assert user_folder() == Path(f"/tmp/tandem-{os.getuid()}")


def test_a_session_that_ends_takes_nothing_with_it(temp: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = tmp_path / "session"
    session.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(session))
    before = local_endpoint(tmp_path)
    assert list(session.iterdir()) == []
    session.rmdir()
    assert local_endpoint(tmp_path) == before
