"""The head in 8 bits for the token step in C (logits.h): its codes in a file, and the logits of rows.

    head.codes    [V' / 16, H' / 4, 16, 4] int8    16 rows of the head side by side, four inputs of each at once
    head.scales   [V'] fp32                        as in eight_bit.py, which has the formulas
    head.sums     [V'] fp32

V' and H' are V and H filled up with zeros to whole tiles. Unlike oneDNN's layout, this one is the same on every
processor. The file is made once, beside the cached base, under a name with that base's digest, and mapped: all actors
share its pages, and between two orders only scales and sums stay.
"""

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open

from actor.engines.token_step.compiled.library import Library
from actor.engines.token_step.eight_bit import AT_ONCE, CODES, HEADS, SCALES, SUMS, in_eight_bits
from shared.base.cache import CachedBase, made_from
from shared.base.checksum import word_sum
from shared.errors import ModelError
from shared.model.layers.nf4 import WEIGHTS
from shared.tensor_file import MappedFile, file_parts

OUTPUTS, FOUR, HEAD_INPUTS, SIDE_BY_SIDE = 16, 4, 64, 16
"""As in logits.h."""
COMPARED_ROWS = 64
"""Rows that are compared at each end of a head; AT_ONCE and this are whole tiles."""
FORMAT = 1
"""Raise this by one whenever what is written changes, also in `in_eight_bits`, so that older files are not used."""
ADDRESS, INTEGER = ctypes.c_void_p, ctypes.c_int64


@dataclass(frozen=True, kw_only=True)
class TiledHead:
    """Codes of a head, and what they are multiplied by."""

    codes: torch.Tensor
    """[V' / 16, H' / 4, 16, 4] int8"""
    scales: torch.Tensor
    """[V'] fp32"""
    sums: torch.Tensor
    """[V'] fp32"""
    file: MappedFile | None = None
    """In whose memory the codes are."""

    @staticmethod
    def of(weight: torch.Tensor) -> "TiledHead":
        """[V, H], in memory."""
        return in_parts(weight, *weight.shape)

    @staticmethod
    def mapped(file: MappedFile) -> "TiledHead":
        """The codes stay in the file, the other figures are copied."""
        scales, sums = (file.tensors[name].clone() for name in (SCALES, SUMS))
        return TiledHead(codes=file.tensors[CODES], scales=scales, sums=sums, file=file)

    def release(self) -> None:
        """The codes are not needed until the next order."""
        if self.file:
            self.file.release()

    def matches(self, head: torch.Tensor) -> bool:
        """Whether these are the codes of this head, by its first and last rows."""
        size, width = head.shape
        if self.codes.shape[:2] != (filled(size, OUTPUTS) // OUTPUTS, filled(width, HEAD_INPUTS) // FOUR):
            return False
        last = max(0, size // OUTPUTS * OUTPUTS - COMPARED_ROWS)
        for rows in (slice(0, COMPARED_ROWS), slice(last, size)):
            part = TiledHead.of(head[rows])
            own = slice(rows.start, rows.start + len(part.scales))
            tiles = slice(rows.start // OUTPUTS, rows.start // OUTPUTS + len(part.codes))
            found = (self.scales[own], part.scales), (self.sums[own], part.sums), (self.codes[tiles], part.codes)
            if not all(torch.equal(*pair) for pair in found):
                return False
        return True

    def checksums(self) -> dict[str, int]:
        """Of all that is multiplied, as in shared/base/checksum.py."""
        return {CODES: word_sum(self.codes), SCALES: word_sum(self.scales), SUMS: word_sum(self.sums)}


def tiled_head(base: CachedBase) -> CachedBase:
    """The folder with the codes of this base's head, made now if it does not exist. It has its own digest."""
    return made_from(base, f"head-in-tiles-{FORMAT}", lambda work: write_head(base.folder / WEIGHTS, work / WEIGHTS))


def write_head(source: Path, file: Path) -> None:
    with safe_open(source, framework="pt") as reader:
        names = set(reader.keys())
        rows = reader.get_slice(next(name for name in HEADS if name in names))
        head = in_parts(rows, *rows.get_shape())
    # The codes come first, where the file aligns them.
    with file.open("wb") as out:
        out.writelines(file_parts({CODES: head.codes, SCALES: head.scales, SUMS: head.sums}))


def in_parts(rows: Any, size: int, width: int) -> TiledHead:
    """rows: [V, H], of which parts are read. Filled in place: joined from parts, the codes would be in memory twice."""
    outputs, inputs = filled(size, OUTPUTS), filled(width, HEAD_INPUTS)
    codes = torch.zeros(outputs // OUTPUTS, inputs // FOUR, OUTPUTS, FOUR, dtype=torch.int8)
    scales, sums = torch.zeros(outputs), torch.zeros(outputs)
    for start in range(0, size, AT_ONCE):
        some = rows[start : start + AT_ONCE].bfloat16()
        part = slice(start, start + len(some))
        scales[part], sums[part], plain = in_eight_bits(some)
        whole = F.pad(plain, (0, inputs - width, 0, -len(plain) % OUTPUTS))
        tiles = whole.view(-1, OUTPUTS, inputs // FOUR, FOUR).transpose(1, 2)
        codes[start // OUTPUTS :][: len(tiles)] = tiles
    return TiledHead(codes=codes, scales=scales, sums=sums)


def filled(size: int, step: int) -> int:
    return size + -size % step


class HeadFields(ctypes.Structure):
    """`Head` of logits.h: the same order and types."""

    _fields_ = [
        *((name, ADDRESS) for name in ("codes", "scales", "sums", "weight", "x", "logits")),
        *((name, ADDRESS) for name in ("rounded", "steps", "lows", "maxima")),
        *((name, INTEGER) for name in ("size", "width", "inputs", "rows", "threads")),
    ]


class CompiledHead:
    """The product of the head with rows, from 8 bits; the largest logits from its values."""

    def __init__(self, library: Library, tiled: TiledHead, weight: torch.Tensor) -> None:
        """weight: [V, H] bf16"""
        if library.head_bytes != ctypes.sizeof(HeadFields):
            raise ModelError(f"{library.name} has another structure than head.py; set actor.token_step to 'torch'.")
        self.library, self.tiled, self.weight = library, tiled, weight.contiguous()
        self.threads = torch.get_num_threads()

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, H] bf16 -> [n, V] fp32"""
        hidden, (size, width), count = hidden.contiguous(), self.weight.shape, len(hidden)
        inputs = filled(width, HEAD_INPUTS)
        # All have a name, since they are read until the call returns.
        tensors = {
            "codes": self.tiled.codes,
            "scales": self.tiled.scales,
            "sums": self.tiled.sums,
            "weight": self.weight,
            "x": hidden,
            "logits": torch.empty(count, size),
            "rounded": torch.zeros(filled(count, SIDE_BY_SIDE), inputs, dtype=torch.uint8),
            "steps": torch.empty(count),
            "lows": torch.empty(count),
            "maxima": torch.empty(count, -(-size // self.library.head_slice)),
        }
        fields = HeadFields(**{name: tensor.data_ptr() for name, tensor in tensors.items()})
        fields.size, fields.width, fields.rows, fields.threads = size, width, count, self.threads
        fields.inputs = inputs
        self.library.head_logits(ctypes.addressof(fields))
        return tensors["logits"]
