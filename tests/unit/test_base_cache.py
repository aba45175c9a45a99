"""A quantised base on the disk: whatever changes after it was written is found at the next start, in words."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from shared.base_cache import DIGESTS, WEIGHTS, CachedBase, cached_base, file_digest
from shared.config import ModelConfig
from shared.errors import DamageError


@pytest.fixture
def base(checkpoint: Path, tmp_path: Path) -> Callable[[], CachedBase]:
    """One start: the base from a cache of this test's own."""
    return lambda: cached_base(ModelConfig(path=str(checkpoint), cache_dir=str(tmp_path / "cache")))


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
    """The digest is that of the bytes that lie there, not of a note: a checkpoint and a peer will not accept it."""
    first = base()
    flip(first.folder / WEIGHTS, -1)
    listed = json.loads((first.folder / DIGESTS).read_text()) | {WEIGHTS: file_digest(first.folder / WEIGHTS)}
    (first.folder / DIGESTS).write_text(json.dumps(listed))
    assert base().digest not in (first.digest, "")
