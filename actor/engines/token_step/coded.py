"""Products of few rows that read a weight as its codes: of the base in NF4, of the adapter in 8 bits.

    base       W[i] = code[q[i]] * absmax[i / 64],            absmax rounded to bf16
    adapter    W[v, j] = c_v k[v, j],  W = A or s B,          c_v = max_j |W[v, j]| / 127 rounded to bf16,  k int8

x and W x are bf16, the sums of a product fp32.

With few rows, a token step on a CPU takes as long as reading the weights. The codes are a quarter of the bytes of
bf16, and bitsandbytes has a product that reads them, for processors with AVX512-BF16: with 8 rows it takes half of the
time of packed weights (packed.py), with 32 about as long. So codes are read with up to CODED_ROWS rows
(shared/config/processes.py), the dense base with more. With AMX these products are as fast with the dense base for 8
rows, and three times as fast for 32, so they are not used there (shared/process/processor.py). C code reads codes in
its own way (compiled/stored_codes.py). The file of the codes
(shared/base/interleaved.py) is mapped, and `Codes.release` gives its pages back after an order; only the scales, a
thirtieth of a byte per weight, stay.

What is sampled from differs from the learner's policy by rounding: of the base each scale is rounded to bf16 here, in
the dense base each weight. `benchmarks/coded_mismatch.py` finds about the same mismatch as with the dense base, where
sums are rounded differently as well. The importance weight covers both.

The function is called by its name in bitsandbytes' library, because to import that package takes seconds and 120 MB.
Its threads are PyTorch's where both name OpenMP's runtime alike, as in PyTorch's builds for CPUs; else it has as many
of its own (OMP_NUM_THREADS).

The adapter. Each layer multiplies by A and B of four stacks of linears. These factors are small, but before each of
them the base's weights have driven oneDNN's code and tables out of the caches, and to read those back takes most of the
product's time. PyTorch's product with int8 weights has little code; `benchmarks/decode_bound.py` shows what it saves.
It multiplies row by row, so it serves up to CODED_ADAPTER_ROWS rows. A value is wrong by up to a 254th of the largest
of its row: 0.4 % of the row's norm if the values are spread evenly, 0.8 % if they are normal, more with outliers. That
is little, because s B A x is small beside W x; `benchmarks/coded_mismatch.py` finds no difference. B = 0 still gives
the base's numbers. Beside dense weights the adapter stays in bf16: there a token step rounds as the learner does.

Left out: processors for which bitsandbytes dequantises first, and systems other than Linux.
"""

import ctypes
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from shared.base.checksum import word_sum
from shared.base.interleaved import CODES, SCALES
from shared.config.processes import CODED_ADAPTER_ROWS, CODED_ROWS
from shared.model.layers.nf4 import BLOCK
from shared.tensor_file import MappedFile, neighbours

LIBRARY = "libbitsandbytes_cpu.so"
SIZE, ADDRESS = ctypes.c_longlong, ctypes.c_void_p
LARGEST = 127
"""Of the absolute values of the codes."""
SMALLEST_SCALE = 1e-30
"""Small enough to change nothing, and large enough to divide by."""
WIDTH = 16
"""Columns that PyTorch's product with int8 weights reads at once, also beyond the end of a row."""


@cache
def kernel() -> Any:
    """`gemv_4bit_inference`: M, N, K, x, codes, scales, y, block size, strides of the rows of x and y. None where
    library or processor have none."""
    package = find_spec("bitsandbytes")
    if sys.platform != "linux" or package is None or package.origin is None:
        return None
    try:
        library = ctypes.CDLL(str(Path(package.origin).with_name(LIBRARY)))
        supported, found = library.has_avx512bf16_cpu, library.gemv_4bit_inference_cpu_nf4_bf16
    except (OSError, AttributeError):
        return None
    supported.restype = ctypes.c_bool
    found.argtypes, found.restype = [SIZE, SIZE, SIZE, *[ADDRESS] * 4, SIZE, SIZE, SIZE], None
    return found if supported() else None


def reads_codes() -> bool:
    """Whether this machine multiplies by codes."""
    return kernel() is not None


@dataclass(frozen=True, kw_only=True)
class CodedWeight:
    """Codes of one matrix, or of several with the same input."""

    codes: torch.Tensor
    """[out, in / 2] uint8."""
    scales: torch.Tensor
    """[in / 64, out] bf16."""
    most_rows: int = CODED_ROWS

    def product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """[n, in] bf16, [out] -> [n, out]"""
        x = x.contiguous()
        (rows, inputs), outputs = x.shape, len(self.codes)
        y = x.new_empty(rows, outputs)
        weight = self.codes.data_ptr(), self.scales.data_ptr()
        kernel()(rows, outputs, inputs, x.data_ptr(), *weight, y.data_ptr(), BLOCK, inputs, outputs)
        return y if bias is None else y.add_(bias)


class CodedFactor:
    """Codes of one factor, or of several as blocks of one matrix."""

    most_rows = CODED_ADAPTER_ROWS

    def __init__(self, weight: torch.Tensor, scale: float = 1.0) -> None:
        """weight: [out, in] bf16, in any order. scale: s of the adapter for B, 1 for A. Call `encode` when its values
        have changed."""
        self.weight, self.lora_scale = weight, scale
        out, size = weight.shape
        self.filled = -size % WIDTH
        self.codes = torch.zeros(out, size + self.filled, dtype=torch.int8)
        self.row_scales = weight.new_empty(len(weight))

    def encode(self) -> None:
        """Make codes and row scales from the values that the weight has now."""
        wide = self.weight.float()
        largest = wide.abs().amax(dim=1).mul_(abs(self.lora_scale) / LARGEST)
        # A row of zeros, as in B at the start, has codes of zero.
        self.row_scales.copy_(largest.clamp_(min=SMALLEST_SCALE))
        # At most 127.496, however the scale was rounded.
        codes = wide.mul_((self.lora_scale / self.row_scales.float())[:, None]).round_()
        self.codes[:, : codes.shape[1]] = codes

    def product(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """[n, in] bf16, [out] -> [n, out]"""
        x = F.pad(x, (0, self.filled)) if self.filled else x.contiguous()
        y = torch.ops.aten._weight_int8pack_mm(x, self.codes, self.row_scales)
        return y if bias is None else y.add_(bias)


class Codes:
    """The file with the codes of a base."""

    def __init__(self, file: MappedFile) -> None:
        self.file = file
        self.used: dict[str, CodedWeight] = {}
        """By the first of its linears."""

    def of(self, names: Sequence[str]) -> CodedWeight | None:
        """Of linears that are computed at once, by name; they are neighbours in the file. None if one has no codes."""
        found = neighbours([self.file.tensors.get(f"{name}.{CODES}") for name in names])
        if found is None:
            return None
        scales = torch.cat([self.file.tensors[f"{name}.{SCALES}"] for name in names], dim=1)
        self.used[names[0]] = CodedWeight(codes=found, scales=scales)
        return self.used[names[0]]

    def sums(self) -> dict[str, int]:
        """Of all that is multiplied, as in shared/base/checksum.py."""
        parts = {f"{name}.{CODES}": one.codes for name, one in self.used.items()}
        parts |= {f"{name}.{SCALES}": one.scales for name, one in self.used.items()}
        return {name: word_sum(tensor) for name, tensor in parts.items()}

    def release(self) -> None:
        self.file.release()
