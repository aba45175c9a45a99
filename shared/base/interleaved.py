"""The NF4 codes of a base in the order in which a processor multiplies by them.

    <linear>.codes    [out, in / 2] uint8: 32 rows at a time, and of these two columns at a time,
                      64 codes row by row; code i is in the low half of byte i, code i + 32 in its high half
    <linear>.scales   [in / 64, out] bf16: absmax of each block, rounded

The order is that of bitsandbytes' product for few rows on a CPU (actor/engines/token_step/coded.py). The file is made
once, beside the cached base, under a name with that base's digest, from its codes alone. It takes 0.53 bytes per
weight. Codes of linears with the same input are neighbours, as in the dense base.
Left out: linears with other shapes than whole blocks. They are read from the dense base.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from shared.base.cache import CPU, CachedBase, made_from, place_in_file
from shared.model.layers.nf4 import BLOCK, PARTS, STATE_KEY, WEIGHTS, NF4Weight, block_scales, from_tensors, read_facts
from shared.tensor_file import header, values_of

CODES, SCALES = "codes", "scales"
ROWS_TOGETHER = 32
"""Rows of a weight that are stored together."""
FORMAT = 1
"""Changes with the content, so that older files are not used."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One tensor of the file."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    weight: str
    """Of the cached base."""


def interleaved_base(base: CachedBase) -> CachedBase:
    """The folder with the codes of this base, made now if it does not exist. It has its own digest."""
    return made_from(base, f"codes-{FORMAT}", lambda work: write_codes(base.folder / WEIGHTS, work / WEIGHTS))


def write_codes(source: Path, file: Path) -> None:
    """One weight after another, which needs the memory of the largest only."""
    with safe_open(source, framework="pt") as reader, file.open("wb") as out:
        plan = [*planned(reader)]
        out.write(header(plan))
        for entry in plan:
            parts = (entry.weight, *(f"{entry.weight}.{part}" for part in PARTS))
            weight = from_tensors(entry.weight, {part: reader.get_tensor(part) for part in parts}, CPU)
            values = interleaved(weight) if entry.name.endswith(CODES) else scales_of(weight)
            out.write(values_of(values))


def planned(reader: Any) -> Iterator[Entry]:
    """First the scales, which are of a wider type."""
    names = set(reader.keys())
    fitting: dict[str, tuple[int, int]] = {}
    for name in sorted((name for name in names if f"{name}.{STATE_KEY}" in names), key=place_in_file):
        outputs, inputs = read_facts(reader.get_tensor(f"{name}.{STATE_KEY}"))["shape"]
        if outputs % ROWS_TOGETHER == 0 and inputs % BLOCK == 0:
            fitting[name] = outputs, inputs
    for name, (outputs, inputs) in fitting.items():
        shape, linear = torch.Size((inputs // BLOCK, outputs)), name.removesuffix(".weight")
        yield Entry(name=f"{linear}.{SCALES}", shape=shape, dtype=torch.bfloat16, weight=name)
    for name, (outputs, inputs) in fitting.items():
        shape, linear = torch.Size((outputs, inputs // 2)), name.removesuffix(".weight")
        yield Entry(name=f"{linear}.{CODES}", shape=shape, dtype=torch.uint8, weight=name)


def interleaved(weight: NF4Weight) -> torch.Tensor:
    """[out, in / 2]"""
    outputs, inputs = read_facts(weight.facts)["shape"]
    packed = weight.packed.view(outputs // ROWS_TOGETHER, ROWS_TOGETHER, inputs // 2)
    codes = torch.stack([packed >> 4, packed & 15], dim=3).transpose(1, 2).reshape(-1, 2, ROWS_TOGETHER)
    return (codes[:, 1] << 4 | codes[:, 0]).view(outputs, inputs // 2)


def scales_of(weight: NF4Weight) -> torch.Tensor:
    """[in / 64, out]"""
    outputs, inputs = read_facts(weight.facts)["shape"]
    return block_scales(weight).view(outputs, inputs // BLOCK).t().bfloat16()
