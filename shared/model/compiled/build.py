"""C code that is built once, with the C compiler of this machine, and kept in the cache folder as a shared library.

    compiler    $CC or gcc; clang has no __builtin_shuffle
    threads     those of PyTorch: a library is linked with PyTorch's own OpenMP. With a second one, the threads of both
                would wait for each other's cores
    name        has a digest of the sources, the options, the compiler, the processor and the type of the weights

It is compiled for this processor, so that each machine has its own, also where several share a cache folder. The result
is the same each time. Another compiler or processor may give other last bits, as other kernels of PyTorch do.

Left out: systems other than Linux, PyTorch with another OpenMP, and a library for several processors in the package.
"""

import ctypes
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from shared.config.model import CACHE_DIR_KEY
from shared.process.processor import C_CODE_COMPILERS, INSTALL_COMPILER, find_compiler
from shared.run.file_lock import exclusive
from shared.run.files import make_folder, write_whole

HEADERS = Path(__file__).parent
"""What all C code includes."""
TORCH_LIBRARIES = Path(torch.__file__).parent / "lib"
OPTIONS = ("-std=gnu11", "-O3", "-march=native", "-fno-math-errno", "-fopenmp", "-fPIC")
"""Of every build; `options_for` adds others. The name of the file depends on all."""
NO_TILES = "-DNO_TILES"
"""Where the kernel does not let this process use AMX, though the processor has it."""
IN_BF16 = "-DIN_BF16"
LIMIT_S = 120.0
"""For one call of the compiler."""
INTEGER, ADDRESS, NUMBER = ctypes.c_int64, ctypes.c_void_p, ctypes.c_double


class CannotCompile(Exception):
    """The message says why, as a part of a sentence."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """What one library is compiled from."""

    name: str
    """First part of the library's name."""
    main: Path
    """The .c file; what else is in its folder may be included."""

    def files(self) -> list[Path]:
        """All that may take part."""
        return sorted({file for folder in (self.main.parent, HEADERS) for file in folder.glob("*.[ch]")})


def built(source: Source, dtype: torch.dtype, cache: Path) -> Path:
    """The library, made now if it does not exist. cache: its folder."""
    compiler, runtime = find_compiler(os.environ, C_CODE_COMPILERS), openmp_of_torch()
    if compiler is None:
        raise CannotCompile(f"there is no C compiler; {INSTALL_COMPILER}")
    options = options_for(dtype)
    facts = [*options, runtime.name, target_of(compiler)]
    digest = hashlib.sha256(repr(facts).encode())
    for part in source.files():
        digest.update(part.name.encode() + b"\0" + part.read_bytes())
    file = cache / f"{source.name}-{digest.hexdigest()[:16]}.so"
    make_folder(cache, place=CACHE_DIR_KEY)
    with exclusive(file.with_suffix(".lock"), CACHE_DIR_KEY):
        if not file.exists():
            write_whole(file, compiled(compiler, source.main, options, runtime), place=CACHE_DIR_KEY)
    return file


def openmp_of_torch(libraries: Path = TORCH_LIBRARIES) -> Path:
    """PyTorch's builds bring libgomp, under its own name or one with a digest."""
    folders = (libraries, libraries.parent.with_name("torch.libs"))
    found = sorted(file for folder in folders for file in folder.glob("libgomp*.so*"))
    if not found:
        raise CannotCompile("this build of PyTorch has no libgomp")
    return found[0]


def options_for(dtype: torch.dtype) -> tuple[str, ...]:
    tiles = () if torch.cpu._init_amx() else (NO_TILES,)
    return (*OPTIONS, *tiles, *((IN_BF16,) if dtype == torch.bfloat16 else ()))


def target_of(compiler: str) -> str:
    """The compiler's version, and the processor as it sees it."""
    return run([compiler, "--version"]) + run([compiler, "-march=native", "-Q", "--help=target"])


def compiled(compiler: str, main: Path, options: Sequence[str], runtime: Path) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        parts, library = Path(folder) / "parts.o", Path(folder) / "library.so"
        run([compiler, *options, f"-I{HEADERS}", "-c", "-o", str(parts), str(main)])
        # Without -fopenmp, which would link the system's libgomp.
        run([compiler, "-shared", "-o", str(library), str(parts), str(runtime), "-lm"])
        return library.read_bytes()


def run(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotCompile(f"'{command[0]}' does not work: {error}") from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        raise CannotCompile(f"'{command[0]}' failed: {lines[0] if lines else f'status {done.returncode}'}")
    return done.stdout


def opened(file: Path) -> ctypes.CDLL:
    if not is_private(file):
        raise CannotCompile(f"{file} belongs to another user, or others may write it; remove it")
    try:
        return ctypes.CDLL(str(file))
    except OSError as error:
        # A file system that is mounted noexec, as one reason.
        raise CannotCompile(f"{file} cannot be loaded: {error}; if it is damaged, remove it") from error


def is_private(file: Path) -> bool:
    """Whether only its owner, who is this user or root, can change it."""
    facts = file.stat()
    return facts.st_uid in (0, os.geteuid()) and not facts.st_mode & 0o022
