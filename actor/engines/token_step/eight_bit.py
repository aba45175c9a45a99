"""The product of the head with the rows of a token step, for logits; with the head in 8 bits for long completions.

    W[v] = c_v k[v]        x = s q + l        W x = c_v s (k[v] q) + l r_v

    head.codes    [V, H] int8    k[v] = W[v] / c_v, rounded
    head.scales   [V] fp32       c_v = max_j |W[v, j]| / 127
    head.sums     [V] fp32       r_v = c_v sum_j k[v, j]

q is uint8 over the range of its row: l is the smallest value, s a 255th of the range. Products of codes are summed in
int32, which is exact, so a row's logits do not depend on the others. A processor with VNNI multiplies codes twice as
fast as bf16, and they are half of the bytes. W has the values that a bf16 model computes with.

The 64 largest logits are computed again from the values (shared/model/products.py). The others are wrong by a
hundredth of their spread. In a softmax their errors cancel: of two models, the mismatch between actor and learner stays
the same for one and grows from 0.043 to 0.047 for the other (benchmarks/coded_mismatch.py).

The file with the codes is made once, beside the cached base, under a name with that base's digest. It is mapped, and
takes memory only while an order packs it: oneDNN has its own layout for codes, and rearranging them pays off after
some seventy token steps. An order uses this head if its completions may have EIGHT_BIT_TOKENS or more
(shared/config/processes.py) and the layers read NF4 codes: with 64 tokens it takes about as long as with a packed
copy of the head in bf16, which would be twice as large.
Left out: the linears of the layers. There the errors of x grow from layer to layer, to a mismatch of two to three times
that of the NF4 codes.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from actor.engines.token_step.packed import RowProduct
from shared.base.cache import CachedBase, made_from
from shared.base.checksum import word_sum
from shared.base.mapped import MappedFile
from shared.config.processes import EIGHT_BIT_TOKENS
from shared.model.nf4 import WEIGHTS

CODES, SCALES, SUMS = "head.codes", "head.scales", "head.sums"
LARGEST = 127
"""Absolute value of a weight's code."""
HEADS = ("lm_head.weight", "model.embed_tokens.weight")
"""Names of the head in a file; the second is that of a tied one."""
AT_ONCE = 4096
"""Rows of the head that are converted at once."""
COMPARED_ROWS = 64
"""At both ends of a head."""
FORMAT = 1
"""Changes with the content, so that older files are not used."""
STEPS = 255
"""Between the codes of the smallest and the largest value of a row."""


def eight_bit_head(base: CachedBase) -> CachedBase:
    """The folder with the codes of this base's head, made now if it does not exist. It has its own digest."""
    return made_from(base, f"head-{FORMAT}", lambda work: write_head(base.folder / WEIGHTS, work / WEIGHTS))


def write_head(source: Path, file: Path) -> None:
    with safe_open(source, framework="pt") as reader:
        names = set(reader.keys())
        head = reader.get_slice(next(name for name in HEADS if name in names))
        rows, width = head.get_shape()
        # Filled in place: joined from parts, the codes would be in memory twice.
        scales, sums, codes = torch.empty(rows), torch.empty(rows), torch.empty(rows, width, dtype=torch.int8)
        for start in range(0, rows, AT_ONCE):
            part = slice(start, start + AT_ONCE)
            scales[part], sums[part], codes[part] = in_eight_bits(head[part].bfloat16())
    save_file({SCALES: scales, SUMS: sums, CODES: codes}, file)


def in_eight_bits(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[n, H] -> [n] scales, [n] sums, [n, H] codes"""
    wide = rows.float()
    # A row of zeros, as for tokens that only fill up the vocabulary, has codes of zero.
    scales = (wide.abs().amax(dim=1) / LARGEST).clamp(min=torch.finfo(torch.float32).tiny)
    codes = (wide / scales[:, None]).round().to(torch.int8)
    return scales, scales * codes.sum(dim=1), codes


def nothing() -> None:
    """For codes that are in no file."""


def multiplies_eight_bits() -> bool:
    """Whether this processor has VNNI, without which oneDNN's sums of 8-bit products may overflow."""
    return torch.cpu._is_vnni_supported() and hasattr(torch.ops.onednn, "qlinear_pointwise")


class EightBitHead:
    """Codes of a head, and their product with rows; `pack` comes before `product`."""

    def __init__(
        self, codes: torch.Tensor, scales: torch.Tensor, sums: torch.Tensor, release: Callable[[], None] = nothing
    ) -> None:
        """As in the file. release: called when the codes are not needed until the next order."""
        self.codes, self.scales, self.sums, self.release = codes, scales, sums, release
        self.zeros = torch.zeros(len(scales), dtype=torch.int64)
        """oneDNN asks for the code that stands for zero, one for each row of the head."""
        self.packed: torch.Tensor | None = None
        """The codes in oneDNN's layout."""

    @staticmethod
    def mapped(file: MappedFile) -> "EightBitHead":
        """The codes stay in the file, the other figures are copied."""
        scales, sums = (file.tensors[name].clone() for name in (SCALES, SUMS))
        return EightBitHead(file.tensors[CODES], scales, sums, file.release)

    def pack(self) -> None:
        if self.packed is None:
            self.packed = torch.ops.onednn.qlinear_prepack(self.codes, None)
            self.release()

    def unpack(self) -> None:
        self.packed = None

    def matches(self, head: torch.Tensor) -> bool:
        """Whether these are codes of this head, by its first and last rows."""
        if self.codes.shape != head.shape:
            return False
        ends = (slice(0, COMPARED_ROWS), slice(-COMPARED_ROWS, None))
        return all(torch.equal(self.codes[rows], in_eight_bits(head[rows])[2]) for rows in ends)

    def checksums(self) -> dict[str, int]:
        """Of what stays in memory; the codes are read from the file for each order."""
        return {SCALES: word_sum(self.scales), SUMS: word_sum(self.sums)}

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """[n, H] bf16 -> [n, V] fp32"""
        wide = x.float()
        low, high = wide.aminmax(dim=1, keepdim=True)
        step = ((high - low) / STEPS).clamp_(min=torch.finfo(torch.float32).tiny)
        codes = wide.sub_(low).div_(step).round_().to(torch.uint8)
        y = torch.ops.onednn.qlinear_pointwise(
            codes, 1.0, 0, self.packed, self.scales, self.zeros, None, 1.0, 0, torch.float32, "none", [], ""
        )
        return y.mul_(step).addcmul_(low, self.sums)


class HeadProduct:
    """By the values or by the codes, as the order allows."""

    def __init__(self, dense: torch.Tensor, eight_bit: EightBitHead | None = None) -> None:
        self.plain, self.eight_bit = RowProduct(dense), eight_bit
        self.reads_codes = False

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[n, H] -> [n, V]; fp32 by the codes"""
        if self.eight_bit is not None and self.reads_codes:
            return self.eight_bit.product(x)
        return self.plain(x)

    def choose(self, tokens: int) -> None:
        """For an order whose completions may have so many tokens."""
        self.reads_codes = self.eight_bit is not None and tokens >= EIGHT_BIT_TOKENS

    def prepare(self) -> None:
        """Pack what was chosen, before each order and again after `forget`."""
        if self.eight_bit is None:
            return
        if self.reads_codes:
            self.plain.unpack()
            self.eight_bit.pack()
        else:
            self.eight_bit.unpack()

    def row_products(self) -> list[RowProduct]:
        """What may be packed for the order."""
        return [] if self.reads_codes else [self.plain]

    def forget(self) -> None:
        """Free the copies."""
        self.plain.unpack()
        if self.eight_bit is not None:
            self.eight_bit.unpack()
