"""What Triton needs on a machine to compile its kernels, and what to do where it is missing.

    Triton           with PyTorch's builds for NVIDIA cards; not with those for a CPU
    C compiler       $CC, gcc or clang: a kernel is started through a small library that is built on the first start
    Python.h         of this Python, for that library
    cache folder     $TRITON_CACHE_DIR, or .triton/cache below $TRITON_HOME or the home folder; libraries are loaded
                     from it, so the file system must not forbid that (noexec)

Without one of them PyTorch's own operations compute, and nothing else changes. `doctor` looks too, so neither torch nor
Triton is loaded with this module.
"""

import os
import sysconfig
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from shared.process.processor import INSTALL_COMPILER, find_compiler

INSTALL_TRITON = "install PyTorch's build for NVIDIA cards, which brings it (https://pytorch.org/get-started)"
INSTALL_HEADER = "install Python's headers (Debian, Ubuntu: apt-get install python3-dev)"
OTHER_CACHE = "set TRITON_CACHE_DIR to a folder that can be written to and is not mounted noexec"


@dataclass(frozen=True, kw_only=True)
class Toolchain:
    """What was found."""

    triton: str | None
    """Its version; None if it is not installed."""
    compiler: str | None
    """Path of the C compiler; None if there is none."""
    header: Path
    """Where Python.h should be."""
    has_header: bool
    """Whether it is there."""
    cache: Path
    """Folder of the compiled kernels."""
    cache_serves: bool
    """Whether files can be written there, and libraries loaded."""


@dataclass(frozen=True, kw_only=True)
class Lack:
    """Something that is missing."""

    found: str
    """What is wrong."""
    remedy: str
    """What to do."""


def look_at_toolchain(environment: Mapping[str, str] = os.environ) -> Toolchain:
    header, cache = python_header(), cache_folder(environment)
    return Toolchain(
        triton=triton_version(),
        compiler=find_compiler(environment),
        header=header,
        has_header=header.is_file(),
        cache=cache,
        cache_serves=can_load_from(cache),
    )


def triton_version() -> str | None:
    try:
        return version("triton")
    except PackageNotFoundError:
        return None


def python_header() -> Path:
    # Debian's own scheme names a folder that has no headers.
    scheme = sysconfig.get_default_scheme()
    paths = sysconfig.get_paths(scheme="posix_prefix" if scheme == "posix_local" else scheme)
    return Path(paths["include"]) / "Python.h"


def cache_folder(environment: Mapping[str, str]) -> Path:
    if named := environment.get("TRITON_CACHE_DIR"):
        return Path(named)
    home = environment.get("TRITON_HOME") or os.path.expanduser("~")
    return Path(home) / ".triton" / "cache"


def can_load_from(folder: Path) -> bool:
    """Judged by the nearest folder that exists."""
    existing = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    forbids = os.statvfs(existing).f_flag & os.ST_NOEXEC
    return existing.is_dir() and os.access(existing, os.W_OK | os.X_OK) and not forbids


def missing(toolchain: Toolchain) -> list[Lack]:
    """What keeps Triton from starting; empty if nothing does."""
    lacks: list[Lack] = []
    if toolchain.triton is None:
        lacks.append(Lack(found="Triton is not installed", remedy=INSTALL_TRITON))
    if toolchain.compiler is None:
        lacks.append(Lack(found="there is no C compiler", remedy=INSTALL_COMPILER))
    if not toolchain.has_header:
        lacks.append(Lack(found=f"there is no {toolchain.header}", remedy=INSTALL_HEADER))
    if not toolchain.cache_serves:
        lacks.append(Lack(found=f"compiled kernels cannot be kept in {toolchain.cache}", remedy=OTHER_CACHE))
    return lacks


def jit(function: Callable[..., None]) -> Any:
    """Triton's decorator of a kernel. Its own type knows nothing of the grid and the options of a launch."""
    import triton  # pyright: ignore[reportMissingImports]

    return triton.jit(function)


def power_of_two(count: int) -> int:
    """The smallest that is not below; the length of a block of numbers."""
    return 1 << (count - 1).bit_length()
