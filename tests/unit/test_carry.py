"""The wheels for a machine without network: inside the windows of pyproject.toml, complete, and small."""

import base64
import csv
import hashlib
import io
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks.gpu.carry import SLIMMED, THERE, WHEELS, refuse_if_not_ignored, slim

ROOT = Path(__file__).resolve().parents[2]
INFO = "bitsandbytes-0.50.2.dist-info"


@pytest.fixture(scope="module")
def pinned() -> dict[str, str]:
    """Name -> version of everything that is carried."""
    found = [Requirement(text) for text in (*WHEELS, SLIMMED)]
    return {canonicalize_name(one.name): next(iter(one.specifier)).version for one in found}


def test_all_dependencies_travel_or_are_there(pinned: dict[str, str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = {canonicalize_name(Requirement(text).name): Requirement(text) for text in project["dependencies"]}
    assert needed.keys() - pinned.keys() == THERE
    for name in needed.keys() & pinned.keys():
        assert pinned[name] in needed[name].specifier, name


def wheel(folder: Path, libraries: tuple[str, ...]) -> Path:
    """As bitsandbytes', with a few bytes for each library."""
    path = folder / "bitsandbytes-0.50.2-py3-none-manylinux_2_24_x86_64.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("bitsandbytes/__init__.py", *(f"bitsandbytes/libbitsandbytes_{name}.so" for name in libraries)):
            archive.writestr(name, f"content of {name}")
        archive.writestr(f"{INFO}/METADATA", "Name: bitsandbytes")
        archive.writestr(f"{INFO}/RECORD", "bitsandbytes/libbitsandbytes_cuda118.so,sha256=x,1\n")
    return path


def test_a_slim_wheel_has_two_libraries_and_a_true_list_of_files(tmp_path: Path) -> None:
    whole = wheel(tmp_path, ("cpu", "cuda118", "cuda130", "cuda131", "rocm64", "xpu"))
    slim(whole, tmp_path / "slim.whl")
    with zipfile.ZipFile(tmp_path / "slim.whl") as archive:
        libraries = {name for name in archive.namelist() if name.endswith(".so")}
        assert libraries == {f"bitsandbytes/libbitsandbytes_{name}.so" for name in ("cpu", "cuda130")}
        rows = list(csv.reader(io.StringIO(archive.read(f"{INFO}/RECORD").decode())))
        assert {row[0] for row in rows} == set(archive.namelist())
        for name, found, size in rows:
            if name != f"{INFO}/RECORD":
                content = archive.read(name)
                expected = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
                assert (found, size) == (f"sha256={expected}", str(len(content)))


def test_a_wheel_without_the_library_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"no library for CUDA 13\.0"):
        slim(wheel(tmp_path, ("cpu", "cuda118")), tmp_path / "slim.whl")


def test_a_folder_that_would_be_committed_is_refused() -> None:
    refuse_if_not_ignored(ROOT / ".whl")
    with pytest.raises(SystemExit, match="git does not ignore"):
        refuse_if_not_ignored(ROOT / "wheels")
