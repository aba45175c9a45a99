"""A quantised base on the disk: every change after it was written is found at the next start and reported in words."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from shared.base.cache import DIGESTS, CachedBase, cached_base, existing_base, file_digest
from shared.config.model import ModelConfig, cache_root
from shared.errors import DamageError, RunDirError
from shared.model.nf4 import WEIGHTS
from shared.run.files import UNFINISHED, beside


@pytest.fixture
def base(checkpoint: Path, tmp_path: Path) -> Callable[[], CachedBase]:
    """One start: the base from a cache of this test's own."""
    return lambda: cached_base(ModelConfig(path=str(checkpoint), cache_dir=str(tmp_path / "cache")))


def test_a_base_is_present_once_it_was_made(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_hub = tmp_path / "disk" / "models--us--model" / "snapshots" / "main"
    shutil.copytree(checkpoint, in_hub)
    (tmp_path / "hub").symlink_to(tmp_path / "disk")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    for path, source in ((str(checkpoint), str(checkpoint)), ("us/model", str(in_hub))):
        model = ModelConfig(path=path, cache_dir=str(tmp_path / "cache"))
        assert existing_base(model) is None
        made = cached_base(ModelConfig(path=source, cache_dir=str(tmp_path / "cache")))
        assert existing_base(model) == made.folder
    for nowhere in ("us/other", str(tmp_path / "model.gguf")):
        assert existing_base(ModelConfig(path=nowhere, cache_dir=str(tmp_path / "cache"))) is None


def flip(path: Path, byte: int, bit: int = 0) -> None:
    """One bit of a file; a negative byte counts from the end."""
    data = bytearray(path.read_bytes())
    data[byte] ^= 1 << bit
    path.write_bytes(data)


@pytest.mark.parametrize("byte", [8, 200, -1, -3000])
def test_a_flipped_bit_in_the_weights_is_refused_with_the_remedy(base: Callable[[], CachedBase], byte: int) -> None:
    folder = base().folder
    flip(folder / WEIGHTS, byte)
    with pytest.raises(DamageError, match=rf"{folder} is damaged: {WEIGHTS} .* remove that folder"):
        base()


def test_any_file_may_be_the_damaged_one(base: Callable[[], CachedBase]) -> None:
    folder = base().folder
    for path in sorted(folder.iterdir()):
        whole = path.read_bytes()
        for spoil in (lambda path=path: flip(path, 1), lambda path=path: path.write_bytes(b""), path.unlink):
            spoil()
            with pytest.raises(DamageError, match="is damaged"):
                base()
            path.write_bytes(whole)
    (folder / "stray.json").write_text("{}")
    with pytest.raises(DamageError, match=r"stray\.json"):
        base()


def test_the_remedy_works_and_gives_the_same_bits(base: Callable[[], CachedBase]) -> None:
    first = base()
    flip(first.folder / WEIGHTS, -1)
    shutil.rmtree(first.folder)
    assert base() == first


def test_a_list_made_to_fit_does_not_hide_that_it_is_another_base(base: Callable[[], CachedBase]) -> None:
    """The digest is that of the bytes in the file, not of a note: a checkpoint and a peer will not accept it."""
    first = base()
    flip(first.folder / WEIGHTS, -1)
    listed = json.loads((first.folder / DIGESTS).read_text()) | {WEIGHTS: file_digest(first.folder / WEIGHTS)}
    (first.folder / DIGESTS).write_text(json.dumps(listed))
    assert base().digest not in (first.digest, "")


def test_a_model_whose_name_has_a_dot_has_a_lock_of_its_own(checkpoint: Path, tmp_path: Path) -> None:
    source = tmp_path / "coder-0.5b"
    shutil.copytree(checkpoint, source)
    made = cached_base(ModelConfig(path=str(source), cache_dir=str(tmp_path / "cache"))).folder
    assert {path.name for path in made.parent.iterdir()} == {made.name, f"{made.name}.lock"}


LIMITED = """
import resource, sys
from shared.base.cache import cached_base
from shared.config.tree import ModelConfig
from shared.errors import UserError
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
try:
    cached_base(ModelConfig(path=sys.argv[1], cache_dir=sys.argv[2]))
except UserError as error:
    print(error)
"""


def test_a_cache_that_takes_no_more_is_one_sentence_and_leaves_nothing(checkpoint: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", LIMITED, str(checkpoint), str(tmp_path / "cache")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "cannot be used (File too large)" in done.stdout and done.stdout.count("\n") == 1
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


def test_what_a_killed_writer_left_is_removed_by_the_next(base: Callable[[], CachedBase]) -> None:
    folder = base().folder
    shutil.rmtree(folder)
    left = beside(folder, UNFINISHED)
    left.mkdir()
    (left / WEIGHTS).write_bytes(b"half")
    assert base().folder == folder and not left.exists()


def test_a_cache_that_cannot_be_made_is_one_sentence(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for place in (tmp_path / "file", Path("/proc/cache")):
        with pytest.raises(RunDirError, match=r"^.* cannot be .* model\.cache_dir( that is not a file)?\.$"):
            cached_base(ModelConfig(path=str(checkpoint), cache_dir=str(place)))


@pytest.mark.parametrize("cache", ["", "relative"])
def test_only_an_absolute_cache_folder_counts(cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/of/mine")
    monkeypatch.setenv("XDG_CACHE_HOME", cache)
    assert cache_root(ModelConfig()) == Path("/home/of/mine/.cache/tandem")


NOBODY = """
import os
from pathlib import Path
from shared.config.model import cache_root
from shared.config.tree import ModelConfig
from shared.errors import UserError
os.setuid(54321)
try:
    print(cache_root(ModelConfig()))
except UserError as error:
    print(error)
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root may become a user that does not exist")
@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"XDG_CACHE_HOME": "/cache"}, "/cache/tandem"),
        ({}, "User 54321 has no home folder for quantised models; set model.cache_dir, HOME or XDG_CACHE_HOME."),
    ],
)
def test_a_user_without_a_home(variables: dict[str, str], said: str) -> None:
    clean = {name: text for name, text in os.environ.items() if name not in ("HOME", "XDG_CACHE_HOME")}
    command = [sys.executable, "-c", NOBODY]
    done = subprocess.run(command, env=clean | variables, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == f"{said}\n"
