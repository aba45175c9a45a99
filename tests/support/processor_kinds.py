"""Kinds of processors that this one can play: C code is compiled for each of them."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from shared.model.compiled.build import NO_TILES, Source, compiled, openmp_of_torch, options_for
from shared.process.processor import find_compiler, read_flags
from shared.run.run_dir import CPUINFO

COMPILER = find_compiler({"PATH": "/usr/bin:/usr/local/bin"})
FLAGS = read_flags(CPUINFO)
needs_compiler = pytest.mark.skipif(
    COMPILER is None or "avx2" not in FLAGS, reason="needs gcc and a processor with AVX2"
)
SOFTWARE_TILES = ("-include", str(Path(__file__).with_name("tiles_in_software.h")))
"""So that what AMX computes is tested where there is none."""
FP32, BF16 = torch.float32, torch.bfloat16


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A processor that a library is compiled for."""

    name: str
    dtype: torch.dtype
    options: tuple[str, ...] = ()
    """Beside those of this processor."""
    needs: str = "avx2"


KINDS = (
    Kind(name="fp32", dtype=FP32),
    Kind(name="fp32, AVX2", dtype=FP32, options=("-march=x86-64-v3",)),
    Kind(name="bf16", dtype=BF16),
    Kind(name="bf16, AVX512-BF16", dtype=BF16, options=(NO_TILES,), needs="avx512_bf16"),
    Kind(name="bf16, AVX2", dtype=BF16, options=("-march=x86-64-v3",)),
    Kind(name="bf16, tiles in software", dtype=BF16, options=SOFTWARE_TILES, needs="avx512f"),
)


def library_file(source: Source, kind: Kind, folder: Path) -> Path:
    """Compiled now."""
    if kind.needs not in FLAGS:
        pytest.skip(f"needs a processor with {kind.needs}")
    assert COMPILER
    file = folder / f"{source.name}.so"
    file.write_bytes(compiled(COMPILER, source.main, (*options_for(kind.dtype), *kind.options), openmp_of_torch()))
    return file
