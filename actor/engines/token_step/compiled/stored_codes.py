"""The NF4 codes of a base as its file has them, for the token step in C (codes.h).

    codes     two in a byte, in the order of the weight; mapped, so that all processes share the pages
    scales    [out, in / 64] fp32, made from the file's own 8 bits; a sixteenth of a byte for each weight

The values that the C code makes of them are those of the dense base, bit for bit, so a completion does not depend on
which of the two was read. Prompts are still computed with the dense base, and so are linears whose rows are not whole
blocks, and all of a model in fp16, whose values are rounded twice.
"""

from dataclasses import dataclass

import torch

from shared.base.checksum import word_sum
from shared.model.layers.nf4 import BLOCK, PARTS, STATE_KEY, block_scales, from_tensors, read_facts
from shared.tensor_file import MappedFile

CPU = torch.device("cpu")
OWN_TYPES = ("bfloat16", "float32")
"""Of a base whose values are rounded to bf16 once."""


@dataclass(frozen=True, kw_only=True)
class StoredWeight:
    """One linear."""

    codes: torch.Tensor
    """[out * in / 2, 1] uint8"""
    scales: torch.Tensor
    """[out * in / 64] fp32"""
    levels: torch.Tensor
    """[16] fp32 the values of the codes."""


class StoredCodes:
    """The file of a base in NF4."""

    def __init__(self, file: MappedFile) -> None:
        self.file = file
        self.read: dict[str, StoredWeight | None] = {}
        """What was asked for, by linear."""

    def of(self, linear: str) -> StoredWeight | None:
        """None if this linear is read from the dense base."""
        if linear not in self.read:
            self.read[linear] = self.stored(f"{linear}.weight") if self.has(f"{linear}.weight") else None
        return self.read[linear]

    def has_any(self) -> bool:
        """Whether there is a linear with codes."""
        return any(
            self.has(name.removesuffix(f".{STATE_KEY}")) for name in self.file.tensors if name.endswith(STATE_KEY)
        )

    def has(self, weight: str) -> bool:
        state = self.file.tensors.get(f"{weight}.{STATE_KEY}")
        facts = None if state is None else read_facts(state)
        return facts is not None and facts["shape"][1] % BLOCK == 0 and facts["dtype"] in OWN_TYPES

    def stored(self, weight: str) -> StoredWeight:
        names = (weight, *(f"{weight}.{part}" for part in PARTS))
        found = from_tensors(weight, {name: self.file.tensors[name] for name in names}, CPU)
        # The levels are copied, because a file need not align them.
        return StoredWeight(codes=found.packed, scales=block_scales(found), levels=found.quant_map.clone())

    def sums(self) -> dict[str, int]:
        """Of all that is multiplied, as in shared/base/checksum.py."""
        used = {name: one for name, one in self.read.items() if one is not None}
        parts = {f"{name}.stored codes": one.codes for name, one in used.items()}
        parts |= {f"{name}.scales": one.scales for name, one in used.items()}
        parts |= {f"{name}.levels": one.levels for name, one in used.items()}
        return {name: word_sum(tensor) for name, tensor in parts.items()}

    def release(self) -> None:
        """The codes are not needed until the next order."""
        self.file.release()
