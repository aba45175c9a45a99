"""The product of a head in 8 bits with the rows of a token step, for logits.

    W[v] = c_v k[v]        x = s q + l        W x = c_v s (k[v] q) + l r_v

    head.codes    bytes          k[v] = W[v] / c_v, rounded to int8; in oneDNN's layout for this processor
    head.layout   bytes          oneDNN's description of it
    head.scales   [V] fp32       c_v = max_j |W[v, j]| / 127
    head.sums     [V] fp32       r_v = c_v sum_j k[v, j]

q is uint8 over the range of its row: l is the smallest value, s a 255th of the range. Products of codes are summed in
int32, which is exact, so a row's logits do not depend on the others. A processor with VNNI multiplies codes twice as
fast as bf16, and they are half of the bytes. W has the values that a bf16 model computes with.

The 64 largest logits are computed again from the values (shared/model/layers/products.py). The others are wrong by a
hundredth of their spread. In a softmax their errors cancel: of two models, the mismatch between actor and learner stays
the same for one and grows from 0.042 to 0.047 for the other (benchmarks/coded_mismatch.py).

C code has codes, a file and a product of its own (compiled/head.py). To bring codes into oneDNN's layout takes as long
as six token steps, so they are stored in it. The file is made once for each kind of processor, beside the cached base,
under a name with that base's digest. It is mapped: all actors share its pages, and between two orders only scales, sums
and zeros stay. PyTorch has no function in Python for a tensor of that layout over memory that exists; its functions for
compiled programs, which store their weights in the same way, are called by name.
`actor.head = "auto"` takes it for long completions only. Short ones would gain little, and in them more depends on each
token: with 16 tokens of a model of 135 million parameters, the mismatch grew from 0.035 to 0.042. Left out: the linears
of the layers. There the errors of x grow from layer to layer, to a mismatch of two to three times that of NF4 codes.
"""

import ctypes
import hashlib
import os
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from shared.base.cache import CachedBase, made_from
from shared.base.checksum import word_sum
from shared.errors import ModelError
from shared.model.layers.nf4 import WEIGHTS
from shared.tensor_file import MappedFile, file_parts

CODES, LAYOUT, SCALES, SUMS = "head.codes", "head.layout", "head.scales", "head.sums"
LARGEST = 127
"""Of the absolute values of the weights' codes."""
HEADS = ("lm_head.weight", "model.embed_tokens.weight")
"""Names of the head in a file; the second is that of a tied one."""
AT_ONCE = 4096
"""Rows of the head that are converted at once."""
REMEDY = "set actor.head to 'dense', and report it"
COMPARED_ROWS = 64
"""Rows that are compared at each end of a head."""
FORMAT = 2
"""Raise this by one whenever what is written changes, so that older files are not used."""
STEPS = 255
"""Between the codes of the smallest and the largest value of a row."""
ROUNDING = 1e-6
"""Relative error that is allowed in a sum of products times its scale."""
MULTIPLIED_ROWS = 8
"""Rows of made-up values that `matches` multiplies."""
CHECKED_WIDTH = 128
"""Number of inputs, and of outputs, of the head that is made up for a check."""
ISA_VARIABLE = "ONEDNN_MAX_CPU_ISA"
LIBRARY = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
INTEGER, ADDRESS = ctypes.c_int64, ctypes.c_void_p


@cache
def multiplies_eight_bits() -> bool:
    """Whether products with codes are exact here. Without VNNI, which a setting of oneDNN may switch off as well, two
    of the largest products overflow 16 bits; and a processor without it multiplies codes slowly."""
    if not torch.cpu._is_vnni_supported() or tensor_over_memory() is None:
        return False
    largest, product = torch.full((2, CHECKED_WIDTH), STEPS, dtype=torch.uint8), CHECKED_WIDTH * STEPS * LARGEST
    head = EightBitHead.of(torch.ones(CHECKED_WIDTH, CHECKED_WIDTH))
    return torch.allclose(head.times_codes(largest), product * head.scales, rtol=ROUNDING, atol=0.0)


@cache
def tensor_over_memory() -> Any:
    """`aoti_torch_create_tensor_from_blob_v2`: address, dimensions, sizes, strides, offset, type, device, its number,
    result, kind of layout, description of the layout, its length. None in a PyTorch that lacks a function."""
    of_layout = (hasattr(torch.ops.mkldnn, name) for name in ("_nbytes", "data_ptr", "_get_mkldnn_serialized_md"))
    of_product = (hasattr(torch.ops.onednn, name) for name in ("qlinear_prepack", "qlinear_pointwise"))
    if not all((*of_layout, *of_product)):
        return None
    try:
        found = ctypes.CDLL(str(LIBRARY)).aoti_torch_create_tensor_from_blob_v2
    except (OSError, AttributeError):
        return None
    sizes, number, result = ctypes.POINTER(INTEGER), ctypes.c_int32, ctypes.POINTER(ADDRESS)
    found.argtypes = [ADDRESS, INTEGER, sizes, sizes, INTEGER, *[number] * 3, result, number, ADDRESS, INTEGER]
    return found


def layout_name() -> str:
    """Of the layout that oneDNN chooses here: it may change with the processor, the version and the settings."""
    facts = torch.__version__, torch.__config__.show(), torch.cpu._is_amx_tile_supported(), os.environ.get(ISA_VARIABLE)
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:8]


def eight_bit_head(base: CachedBase) -> CachedBase:
    """The folder with the codes of this base's head, made now if it does not exist. It has its own digest."""
    name = f"head-{FORMAT}-{layout_name()}"
    return made_from(base, name, lambda work: write_head(base.folder / WEIGHTS, work / WEIGHTS))


def write_head(source: Path, file: Path) -> None:
    scales, sums, codes = codes_of_head(source)
    # The codes come first, where the file aligns them.
    layout = torch.ops.mkldnn._get_mkldnn_serialized_md(codes)
    parts = {CODES: bytes_of(codes), SCALES: scales, SUMS: sums, LAYOUT: layout}
    with file.open("wb") as out:
        out.writelines(file_parts(parts))


def codes_of_head(source: Path) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[V] scales, [V] sums, codes in oneDNN's layout"""
    with safe_open(source, framework="pt") as reader:
        names = set(reader.keys())
        head = reader.get_slice(next(name for name in HEADS if name in names))
        rows, width = head.get_shape()
        # Filled in place: joined from parts, the codes would be in memory once more.
        scales, sums, codes = torch.empty(rows), torch.empty(rows), torch.empty(rows, width, dtype=torch.int8)
        for start in range(0, rows, AT_ONCE):
            part = slice(start, start + AT_ONCE)
            scales[part], sums[part], codes[part] = in_eight_bits(head[part].bfloat16())
    return scales, sums, torch.ops.onednn.qlinear_prepack(codes, None)


def in_eight_bits(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[n, H] -> [n] scales, [n] sums, [n, H] codes"""
    wide = rows.float()
    # A row of zeros, as for tokens that only fill up the vocabulary, has codes of zero.
    scales = (wide.abs().amax(dim=1) / LARGEST).clamp(min=torch.finfo(torch.float32).tiny)
    codes = (wide / scales[:, None]).round().to(torch.int8)
    return scales, scales * codes.sum(dim=1), codes


def bytes_of(codes: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor in oneDNN's layout, which must outlive the result."""
    size = torch.ops.mkldnn._nbytes(codes)
    memory = (ctypes.c_uint8 * size).from_address(torch.ops.mkldnn.data_ptr(codes))
    return torch.frombuffer(memory, dtype=torch.uint8)


def codes_over(memory: torch.Tensor, layout: torch.Tensor) -> torch.Tensor:
    """[H, V] The tensor in oneDNN's layout whose bytes these are; they must outlive it. The layout says its shape."""
    library, result, no_sizes = ctypes.CDLL(str(LIBRARY)), ADDRESS(), (INTEGER * 2)()
    kind = library.aoti_torch_dtype_int8(), library.aoti_torch_device_type_cpu(), 0
    described = library.aoti_torch_layout__mkldnn(), layout.data_ptr(), len(layout)
    failed = tensor_over_memory()(memory.data_ptr(), 2, no_sizes, no_sizes, 0, *kind, ctypes.byref(result), *described)
    found = None if failed else taken_over(result)
    if found is None or torch.ops.mkldnn._nbytes(found) != len(memory):
        raise ModelError(f"PyTorch does not accept the layout of the head in 8 bits; {REMEDY}.")
    return found


def taken_over(handle: ctypes.c_void_p) -> torch.Tensor:
    """The tensor that this library's function has made."""
    from torch._C._aoti import alloc_tensor_by_stealing_from_void_ptr

    in_capsule = ctypes.pythonapi.PyCapsule_New
    in_capsule.restype, in_capsule.argtypes = ctypes.py_object, [ADDRESS, ctypes.c_char_p, ADDRESS]
    return alloc_tensor_by_stealing_from_void_ptr(in_capsule(handle, None, None))


class EightBitHead:
    """Codes of a head, and their product with rows."""

    def __init__(
        self, codes: torch.Tensor, scales: torch.Tensor, sums: torch.Tensor, file: MappedFile | None = None
    ) -> None:
        """codes: in oneDNN's layout. file: in whose memory they are."""
        self.codes, self.scales, self.sums = codes, scales, sums
        self.file = file
        """Kept because the codes do not keep it."""
        self.zeros = torch.zeros(len(scales), dtype=torch.int64)
        """oneDNN asks for the code that stands for zero, one for each row of the head."""

    @staticmethod
    def of(weight: torch.Tensor) -> "EightBitHead":
        """[V, H], in memory."""
        scales, sums, codes = in_eight_bits(weight)
        return EightBitHead(torch.ops.onednn.qlinear_prepack(codes, None), scales, sums)

    @staticmethod
    def mapped(file: MappedFile) -> "EightBitHead":
        """The codes stay in the file, the other figures are copied."""
        scales, sums = (file.tensors[name].clone() for name in (SCALES, SUMS))
        return EightBitHead(codes_over(file.tensors[CODES], file.tensors[LAYOUT]), scales, sums, file)

    def release(self) -> None:
        """The codes are not needed until the next order."""
        if self.file:
            self.file.release()

    def matches(self, head: torch.Tensor) -> bool:
        """Whether products are those of this head, by its first and last rows."""
        if self.codes.shape != head.shape[::-1]:
            return False
        x = torch.randint(256, (MULTIPLIED_ROWS, head.shape[1]), generator=torch.Generator().manual_seed(0))
        found = self.times_codes(x.to(torch.uint8))
        for rows in (slice(0, COMPARED_ROWS), slice(-COMPARED_ROWS, None)):
            scales, sums, codes = in_eight_bits(head[rows])
            expected = (x @ codes.long().t()) * scales
            same = torch.equal(self.scales[rows], scales) and torch.equal(self.sums[rows], sums)
            if not same or not torch.allclose(found[:, rows], expected, rtol=ROUNDING, atol=0.0):
                return False
        return True

    def checksums(self) -> dict[str, int]:
        """Of all that is multiplied, as in shared/base/checksum.py."""
        return {CODES: word_sum(bytes_of(self.codes)), SCALES: word_sum(self.scales), SUMS: word_sum(self.sums)}

    def times_codes(self, x: torch.Tensor) -> torch.Tensor:
        """[n, H] uint8 -> [n, V] fp32 c (k q)"""
        return torch.ops.onednn.qlinear_pointwise(
            x, 1.0, 0, self.codes, self.scales, self.zeros, None, 1.0, 0, torch.float32, "none", [], ""
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[n, H] bf16 -> [n, V] fp32"""
        wide = x.float()
        low, high = wide.aminmax(dim=1, keepdim=True)
        step = ((high - low) / STEPS).clamp_(min=torch.finfo(torch.float32).tiny)
        product = self.times_codes(wide.sub_(low).div_(step).round_().to(torch.uint8))
        return product.mul_(step).addcmul_(low, self.sums)
