"""The adapter as bytes: PEFT's file format, which is also what crosses the wire.

`base_model.model.<layer>.lora_A.weight` [R, in] and `.lora_B.weight` [out, R], fp32, plus `adapter_config.json`.
Names, shapes and dtype must match the model exactly, none twice, and every value must be finite, or nothing is
installed.
The file's sha256 is the adapter's identity everywhere: in the handshake, in each group, in the summary.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from shared.config import LoraConfig
from shared.errors import DamageError
from shared.lora import Adapter

PREFIX = "base_model.model."
LENGTH_BYTES = 8
MAX_ENTRY_BYTES = 1024


def adapter_bytes(adapter: Adapter) -> bytes:
    """The whole adapter as a safetensors file, the same bytes for the same values."""
    tensors = {peft_name(name): value.detach().cpu().contiguous() for name, value in adapter.parameters().items()}
    return save(tensors, metadata={"format": "pt"})


def install_adapter(adapter: Adapter, data: bytes, *, finite: bool = True) -> None:
    """Copy the values in; all or nothing. finite=False takes broken values too, to put them back or look at them."""
    parameters = adapter.parameters()
    tensors = read_adapter(data, {name: value.shape for name, value in parameters.items()}, finite=finite)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])


def read_adapter(data: bytes, shapes: Mapping[str, Sequence[int]], *, finite: bool = True) -> dict[str, torch.Tensor]:
    """The values by the names of `shapes` (`layer.lora_A`), each of its shape and fp32, or DamageError."""
    wanted = {peft_name(name): shape for name, shape in shapes.items()}
    check_header(data, len(wanted))
    try:
        tensors = load(data)
    except SafetensorError as error:
        raise DamageError(f"The adapter is no safetensors file ({error}); use another checkpoint.") from error
    if missing := sorted(wanted.keys() ^ tensors.keys()):
        raise DamageError(f"The adapter does not fit the model: '{missing[0]}' is in only one of the two.")
    for name, shape in wanted.items():
        check_tensor(name, tensors[name], shape, finite)
    return {name: tensors[peft_name(name)] for name in shapes}


def check_header(data: bytes, num_tensors: int) -> None:
    """What safetensors would take: a header that is larger than any of ours, and a name that stands twice."""
    length = int.from_bytes(data[:LENGTH_BYTES], "little")
    if length > MAX_ENTRY_BYTES * (num_tensors + 1):
        raise DamageError(f"The adapter's header has {length} bytes, too many for {num_tensors} tensors.")
    try:
        json.loads(data[LENGTH_BYTES : LENGTH_BYTES + length], object_pairs_hook=distinct)
    except (ValueError, RecursionError) as error:
        raise DamageError(f"The adapter's header cannot be read ({error}); use another checkpoint.") from error


def distinct(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """A JSON object, if no name stands twice in it."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands twice")
    return found


def check_tensor(name: str, tensor: torch.Tensor, shape: Sequence[int], finite: bool) -> None:
    """Shape and dtype of one entry, and that it is finite where it must be."""
    if tuple(tensor.shape) != tuple(shape) or tensor.dtype != torch.float32:
        got, expected = (tuple(tensor.shape), tensor.dtype), (tuple(shape), torch.float32)
        raise DamageError(f"Adapter entry '{name}' is {got}, the model needs {expected}.")
    if finite and not bool(torch.isfinite(tensor).all()):
        raise DamageError(f"Adapter entry '{name}' has values that are not finite; use an earlier checkpoint.")


def peft_name(name: str) -> str:
    """`model.layers.0.q_proj.lora_A` -> PEFT's name of the same tensor."""
    return f"{PREFIX}{name}.weight"


def adapter_config(lora: LoraConfig, base: str) -> bytes:
    """`adapter_config.json` as PEFT reads it."""
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
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
    """The same from shapes by parameter and scales by layer."""
    layout = [[name, list(shape)] for name, shape in shapes.items()]
    return hashlib.sha256(json.dumps([layout, sorted(scales.items())]).encode()).hexdigest()


def digest(data: bytes) -> str:
    """sha256 in hex."""
    return hashlib.sha256(data).hexdigest()
