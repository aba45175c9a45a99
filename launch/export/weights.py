"""Merges the adapter into the base:  W' = deq(W4) + s B A,  computed in fp32, then rounded. s: lora.py's scale.

The adapter is added to the dense base, because it was trained on that base. Added to the model's original
weights, it would correct quantisation errors that they do not have. The sum is never quantised to 4 bits (see REFUSED).
Tensors are merged one after the other and written in files of at most SHARD_BYTES with the hub's index, so that a model
may be larger than memory. Left out: sums in bf16, because rounding would lose most of the small product.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load

from shared.errors import DamageError
from shared.model.adapter_file import PREFIX
from shared.model.layers.nf4 import PARTS, WEIGHTS, from_tensors
from shared.tensor_file import save_tensors

SHARD_BYTES = 2 << 30
REFUSED = (
    "A 4-bit weight can only be one of 16 values in each block, and what an adapter adds is mostly smaller than the"
    " distance between two of them: quantised again, the sum would lose a part of what was trained and gain new errors."
    " Use `--as peft` (the 4-bit base and the adapter stay apart), or `--as merged` with --dtype bf16, and quantise the"
    " result with a method that measures what it loses."
)
CPU = torch.device("cpu")


class Deltas:
    """s B A of every adapted layer, from an adapter file."""

    def __init__(self, adapter: bytes, scale_of: Callable[[str], float]) -> None:
        """scale_of: s of a layer."""
        self.tensors = load(adapter)
        self.scale_of = scale_of
        self.layers = {name.removeprefix(PREFIX).rpartition(".lora_")[0] for name in self.tensors}
        self.added: set[str] = set()

    def add_to(self, layer: str, weight: torch.Tensor) -> torch.Tensor:
        """[out, in] fp32 -> W + s B A; W itself if the layer has no adapter."""
        if layer not in self.layers:
            return weight
        self.added.add(layer)
        a, b = (self.tensors[f"{PREFIX}{layer}.{pair}.weight"] for pair in ("lora_A", "lora_B"))
        return torch.addmm(weight, b, a, alpha=self.scale_of(layer))

    def refuse_leftovers(self) -> None:
        """Call after the last layer: every pair of the adapter must have found its layer."""
        if left := sorted(self.layers - self.added):
            raise DamageError(
                f"The base has no layer '{left[0]}', but the adapter changes it; base and adapter do not fit together."
            )


def merged_weights(base: Path, deltas: Deltas, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and value of every weight of the model folder `base`, with the adapter added."""
    with safe_open(base / WEIGHTS, framework="pt") as reader:
        names = set(reader.keys())
        parts = {f"{name}.{part}" for name in names for part in PARTS}
        for name in sorted(names - parts):
            dense = dense_weight(name, names, reader)
            yield name, deltas.add_to(name.removesuffix(".weight"), dense).to(dtype).contiguous()
    deltas.refuse_leftovers()


def dense_weight(name: str, names: set[str], reader: Any) -> torch.Tensor:
    """In fp32; dequantised if it is quantised."""
    tensor = reader.get_tensor(name)
    if tensor.dtype != torch.uint8:
        return tensor.float()
    parts = {part: reader.get_tensor(part) for part in (f"{name}.{part}" for part in PARTS) if part in names}
    return from_tensors(name, {name: tensor, **parts}, CPU).dequantize(torch.float32)


def write_weights(folder: Path, weights: Iterator[tuple[str, torch.Tensor]], limit: int = SHARD_BYTES) -> None:
    """model.safetensors, or several files and their index."""
    shards: list[list[str]] = []
    pending: dict[str, torch.Tensor] = {}
    total = 0
    for name, value in weights:
        if pending and size(pending) + value.nbytes > limit:
            shards.append(write_shard(folder, len(shards), pending))
            pending = {}
        pending[name] = value
        total += value.nbytes
    shards.append(write_shard(folder, len(shards), pending))
    name_shards(folder, shards, total)


def size(tensors: Mapping[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def write_shard(folder: Path, number: int, tensors: dict[str, torch.Tensor]) -> list[str]:
    """Writes a file with a number for a name, because the final name contains the number of all files."""
    file = folder / f"shard-{number}"
    # What safetensors writes only its owner may read. A new file shows what the umask allows.
    file.touch(0o644)
    mode = file.stat().st_mode & 0o777
    save_tensors(tensors, file)
    file.chmod(mode)
    return list(tensors)


def name_shards(folder: Path, shards: list[list[str]], total: int) -> None:
    """Renames the files as on the hub, and writes their index."""
    if len(shards) == 1:
        (folder / "shard-0").rename(folder / WEIGHTS)
        return
    where: dict[str, str] = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"shard-{number}").rename(folder / file)
        where |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps(index, indent=2))
