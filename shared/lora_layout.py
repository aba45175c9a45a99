"""What an adapter to a base looks like, read from the base's files without loading it.

    layer [out, in] -> layer.lora_A [R, in], layer.lora_B [out, R]

For a process that never builds the policy itself and must still know which tensors an adapter has to bring, and agree
with the learner about it in the handshake.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

from shared.adapter_file import digest_of_layout
from shared.base_cache import WEIGHTS
from shared.config import LoraConfig
from shared.linears import is_decoder_linear
from shared.lora import PAIR, Adapter, FrozenLinear, HeldMatmul, LoraLinear
from shared.nf4 import STATE_KEY, read_facts


@dataclass(frozen=True, kw_only=True)
class LoraLayout:
    """Layers with an adapter beside them."""

    layers: dict[str, tuple[int, int]]
    """Layer -> (out, in)."""
    rank: int
    """R."""
    scale: float
    """alpha / R."""

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """`layer.lora_A` and `layer.lora_B` of every layer, in the order of `Adapter.parameters`."""
        a, b = PAIR
        pairs = ((layer, *self.layers[layer]) for layer in sorted(self.layers))
        return {
            name: shape
            for layer, out, into in pairs
            for name, shape in ((f"{layer}.{a}", (self.rank, into)), (f"{layer}.{b}", (out, self.rank)))
        }

    @property
    def digest(self) -> str:
        """As `layout_digest` of an adapter that was built."""
        return digest_of_layout(self.shapes, dict.fromkeys(self.layers, self.scale))

    def adapter(self) -> Adapter:
        """Its values alone, beside no base: to initialise, fill and save."""
        nothing = FrozenLinear(HeldMatmul(torch.empty(0)), None)
        return Adapter({name: LoraLinear(nothing, shape, self.rank, self.scale) for name, shape in self.layers.items()})


def read_layout(base: Path, lora: LoraConfig) -> LoraLayout:
    """From the base's weight file."""
    with safe_open(base / WEIGHTS, framework="pt") as file:
        dims = {name: len(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        layers = [name.removesuffix(".weight") for name in dims if is_decoder_linear(name, dims[name])]
        layers = [layer for layer in layers if layer.rpartition(".")[2] in lora.targets]
        shapes = {layer: linear_shape(file, f"{layer}.weight") for layer in layers}
    return LoraLayout(layers=shapes, rank=lora.rank, scale=lora.alpha / lora.rank)


def linear_shape(file: safe_open, name: str) -> tuple[int, int]:
    """(out, in), which NF4 codes do not have themselves."""
    facts = f"{name}.{STATE_KEY}"
    quantised = facts in file.keys()  # noqa: SIM118 - not a dictionary
    out, into = read_facts(file.get_tensor(facts))["shape"] if quantised else file.get_slice(name).get_shape()
    return out, into
