"""The adapter as bytes: PEFT's file format, which also crosses the wire.

    layer [out, in] -> base_model.model.<layer>.lora_A.weight [R, in] and .lora_B.weight [out, R], fp32

and `adapter_config.json`. On the wire the values may be bf16 (`link.adapter_dtype`); the adapter that takes them keeps
its type. Names and shapes must match the model exactly, no name may appear twice, and every value must be finite;
otherwise nothing is installed. In checkpoints the sha256 of the file identifies a version, and in messages that of the
bytes that are sent; in fp32 both are the same.

`LoraLayout` says which tensors an adapter of a base has. It is read from the base's files without loading them, for a
process that never builds the policy (vLLM's actor) but must agree with the learner in the handshake.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load

from shared.config.model import LoraConfig
from shared.errors import DamageError
from shared.model.layers.linears import is_decoder_linear
from shared.model.layers.lora import PAIR, Adapter, DenseMatmul, FrozenLinear, LoraLinear
from shared.model.layers.nf4 import STATE_KEY, WEIGHTS, read_facts
from shared.run.files import FileParts
from shared.tensor_file import tensor_bytes, tensor_parts

PREFIX = "base_model.model."
LENGTH_BYTES = 8
MAX_ENTRY_BYTES = 1024
DTYPES = (torch.float32, torch.bfloat16)


def adapter_bytes(adapter: Adapter, dtype: torch.dtype = torch.float32) -> bytes:
    """The adapter as a safetensors file of this type. Equal values give equal bytes."""
    return b"".join(adapter_parts(adapter, dtype))


def adapter_parts(adapter: Adapter, dtype: torch.dtype = torch.float32) -> FileParts:
    """The same, in the adapter's memory where it is on the CPU and of this type."""
    return tensor_parts(
        {peft_name(name): value.detach().to("cpu", dtype) for name, value in adapter.parameters().items()}
    )


def rounded_file(data: bytes) -> bytes:
    """The same adapter with values of bf16."""
    return tensor_bytes({name: value.to(torch.bfloat16) for name, value in load(data).items()})


def install_adapter(adapter: Adapter, data: bytes, *, finite: bool = True) -> None:
    """Copy all values in, or none. finite=False accepts values that are not finite, to restore or inspect them."""
    parameters = adapter.parameters()
    tensors = read_adapter(data, {name: value.shape for name, value in parameters.items()}, finite=finite)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])


def read_adapter(data: bytes, shapes: Mapping[str, Sequence[int]], *, finite: bool = True) -> dict[str, torch.Tensor]:
    """The values under the names of `shapes` (`layer.lora_A`), checked; DamageError if they do not match."""
    wanted = {peft_name(name): shape for name, shape in shapes.items()}
    check_header(data, len(wanted))
    try:
        tensors = load(data)
    except SafetensorError as error:
        raise DamageError(f"The adapter is not a safetensors file ({error}); use another checkpoint.") from error
    if missing := sorted(wanted.keys() ^ tensors.keys()):
        raise DamageError(f"The adapter does not fit the model: '{missing[0]}' is in only one of the two.")
    for name, shape in wanted.items():
        check_tensor(name, tensors[name], shape, finite)
    return {name: tensors[peft_name(name)] for name in shapes}


def check_header(data: bytes, num_tensors: int) -> None:
    """Refuse what safetensors accepts: a header larger than any of ours, and a name that appears twice."""
    length = int.from_bytes(data[:LENGTH_BYTES], "little")
    if length > MAX_ENTRY_BYTES * (num_tensors + 1):
        raise DamageError(f"The adapter's header has {length} bytes, too many for {num_tensors} tensors.")
    try:
        json.loads(data[LENGTH_BYTES : LENGTH_BYTES + length], object_pairs_hook=distinct)
    except (ValueError, RecursionError) as error:
        raise DamageError(f"The adapter's header cannot be read ({error}); use another checkpoint.") from error


def distinct(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name appears twice")
    return found


def check_tensor(name: str, tensor: torch.Tensor, shape: Sequence[int], finite: bool) -> None:
    if tuple(tensor.shape) != tuple(shape) or tensor.dtype not in DTYPES:
        got, wanted = describe(tensor.shape, tensor.dtype), describe(shape, *DTYPES)
        raise DamageError(f"Adapter entry '{name}' is {got}, the model needs {wanted}.")
    if finite and not bool(torch.isfinite(tensor).all()):
        raise DamageError(f"Adapter entry '{name}' has values that are not finite; use an earlier checkpoint.")


def describe(shape: Sequence[int], *dtypes: torch.dtype) -> str:
    """`[16, 896] in float32 or bfloat16`"""
    return f"{list(shape)} in {' or '.join(str(dtype).removeprefix('torch.') for dtype in dtypes)}"


def peft_name(name: str) -> str:
    """`model.layers.0.q_proj.lora_A` -> PEFT's name of the same tensor."""
    return f"{PREFIX}{name}.weight"


def adapter_config(lora: LoraConfig, base: str) -> bytes:
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "rank_pattern": dict(sorted(lora.ranks.items())),
        "lora_alpha": lora.alpha,
        "use_rslora": lora.rslora,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(lora.targets),
        "inference_mode": True,
        "fan_in_fan_out": False,
    }
    return json.dumps(config, indent=2, sort_keys=True).encode()


def layout_digest(adapter: Adapter) -> str:
    """sha256 over names, shapes and scales: both processes must have built the same adapter."""
    shapes = {name: tuple(value.shape) for name, value in adapter.parameters().items()}
    return digest_of_layout(shapes, {name: layer.scale for name, layer in adapter.layers.items()})


def digest_of_layout(shapes: Mapping[str, Sequence[int]], scales: Mapping[str, float]) -> str:
    """shapes: by parameter. scales: by layer."""
    layout = [[name, list(shape)] for name, shape in shapes.items()]
    return hashlib.sha256(json.dumps([layout, sorted(scales.items())]).encode()).hexdigest()


def digest(*parts: bytes | memoryview) -> str:
    """sha256 of these, one after the other."""
    found = hashlib.sha256()
    for part in parts:
        found.update(part)
    return found.hexdigest()


@dataclass(frozen=True, kw_only=True)
class LoraLayout:
    """Which layers of a base have an adapter, and its shape."""

    layers: dict[str, tuple[int, int]]
    """Layer -> (out, in)."""
    lora: LoraConfig
    """Ranks and scales."""

    @property
    def rank(self) -> int:
        """R of all layers that lora.ranks does not name."""
        return self.lora.rank

    @property
    def scale(self) -> float:
        """Of the same layers."""
        return self.lora.scale_of("")

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """`layer.lora_A` and `layer.lora_B` of every layer, in the order of `Adapter.parameters`."""
        a, b = PAIR
        sizes = ((layer, self.lora.rank_of(layer), *self.layers[layer]) for layer in sorted(self.layers))
        return {
            name: shape
            for layer, rank, out, into in sizes
            for name, shape in ((f"{layer}.{a}", (rank, into)), (f"{layer}.{b}", (out, rank)))
        }

    @property
    def digest(self) -> str:
        """Equals `layout_digest` of an adapter that was built."""
        return digest_of_layout(self.shapes, {layer: self.lora.scale_of(layer) for layer in self.layers})

    def zeros(self) -> bytes:
        """An adapter that changes nothing, as a file."""
        return tensor_bytes({peft_name(name): torch.zeros(shape) for name, shape in self.shapes.items()})

    def adapter(self) -> Adapter:
        """An adapter without a base: to initialise, fill and save."""
        nothing = FrozenLinear(DenseMatmul(torch.empty(0)), None)
        rank, scale = self.lora.rank_of, self.lora.scale_of
        return Adapter(
            {name: LoraLinear(nothing, shape, rank(name), scale(name)) for name, shape in self.layers.items()}
        )


def read_layout(base: Path, lora: LoraConfig) -> LoraLayout:
    """The layout for the base in this folder, from the header of its weight file."""
    with safe_open(base / WEIGHTS, framework="pt") as file:
        dims = {name: len(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        layers = [name.removesuffix(".weight") for name in dims if is_decoder_linear(name, dims[name])]
        layers = [layer for layer in layers if layer.rpartition(".")[2] in lora.targets]
        shapes = {layer: linear_shape(file, f"{layer}.weight") for layer in layers}
    return LoraLayout(layers=shapes, lora=lora)


def linear_shape(file: safe_open, name: str) -> tuple[int, int]:
    """(out, in). The shape of NF4 codes is another, so theirs is read from the quantisation state."""
    facts = f"{name}.{STATE_KEY}"
    quantised = facts in file.keys()  # noqa: SIM118 - not a dictionary
    out, into = read_facts(file.get_tensor(facts))["shape"] if quantised else file.get_slice(name).get_shape()
    return out, into
