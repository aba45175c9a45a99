"""The sizes of a model, read from its config.json and the headers of its weight files, in milliseconds.

No weights are read and no torch is imported, so `run` can plan before it starts anything. The headers name every
tensor, so no list of architectures is needed: what NF4 packs, what gets an adapter and what is left are counted as
shared/base/cache.py and shared/base/load.py will find them.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from shared.base.gguf import LAYER, config_of, is_gguf, open_gguf, tensor_shapes
from shared.config.data import CurriculumConfig
from shared.config.model import ModelConfig, hub_cache_folder, in_hub_cache, is_path, weight_files
from shared.config.processes import ONEDNN_VALUES
from shared.embedded import EMBEDDED
from shared.errors import ModelError
from shared.model.layers.linears import OWN_LAYERS, check_targets, is_decoder_linear

MAX_HEADER_BYTES = 100 * 2**20

FP32_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Tokens of a sample."""

    prompt: int
    """Of a prompt."""
    completion: int
    """Of a completion, on average."""
    longest: int
    """Of the longest completion that is decoded with others."""


@dataclass(frozen=True, kw_only=True)
class Passes:
    """Of the learner, over the whole batch of a step."""

    gradient: int
    """Forward and backward."""
    forward: int
    """Without gradient."""
    updates: int
    """Updates of the adapter in one step."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """What the files of a model say about its size."""

    linear: int
    """Parameters in the matrices of the layers: what NF4 packs."""
    rest: int
    """All others: embedding, head, norms."""
    adapter: int
    """Parameters of the adapter for each unit of rank: the rows and columns of all matrices that get one."""
    file_bytes: int
    """Size of its weight files."""
    layers: int
    """Decoder layers."""
    hidden: int
    """Hidden size."""
    key_value: int
    """Width of a token's keys: heads times head size."""
    vocabulary: int
    """Tokens."""
    heads: int
    """Heads of a query."""
    outputs: int
    """Rows of all matrices of the layers: the values that their products give for one token."""
    own_layers: bool
    """Whether the layers are computed without their modules."""

    @property
    def fits_onednn(self) -> bool:
        """An estimate by size only: whether the matrices of a layer have as many values as two weights that are for
        oneDNN in fp32 (`is_for_onednn` in shared/model/layers/products.py)."""
        return self.linear >= 2 * ONEDNN_VALUES * self.layers


def kind_of(model: ModelConfig) -> Literal["embedded", "folder", "gguf", "hub"]:
    """As shared/base/cache.py reads model.path."""
    if model.path in EMBEDDED:
        return "embedded"
    if is_gguf(model.path):
        return "gguf"
    return "folder" if os.path.isdir(model.path) else "hub"


def local_folder(model: ModelConfig, hub_cache: Path) -> Path | None:
    """The folder of the model, or its file; None unless all of it is on this machine."""
    match kind_of(model):
        case "gguf":
            return Path(model.path) if os.path.isfile(model.path) else None
        case "embedded":
            folder = EMBEDDED[model.path]
        case "folder":
            folder = Path(model.path)
        case "hub":
            folder = in_hub_cache(model, hub_cache)
    if not (folder / "config.json").is_file():
        return None
    files = weight_files(folder)
    return folder if files and all(file.is_file() for file in files) else None


def check_model(model: ModelConfig, targets: Sequence[str]) -> None:
    """ModelError if model.path is no place for a model, or the model on this machine lacks one of lora.targets. Quick,
    and without the network."""
    path, kind, folder = model.path, kind_of(model), local_folder(model, hub_cache_folder())
    # An id of the hub is `name` or `owner/name`.
    if kind == "gguf" and not folder:
        raise ModelError(f"model.path = '{path}' is not a file; check the name.")
    if kind == "hub" and (is_path(path) or path.count("/") > 1):
        raise ModelError(f"model.path = '{path}' is no folder on this machine, and no id of the hub; check the path.")
    # A model of no linears is refused for another reason, once it is loaded.
    if folder and (linears := linear_names(folder)):
        check_targets(targets, linears)


def linear_names(folder: Path) -> list[str]:
    """The modules of its layers that may have an adapter."""
    if is_gguf(folder):
        # All that can be read are alike, and a list of tensors takes seconds.
        return [name for name in LAYER.values() if is_decoder_linear(f"layers.0.{name}.weight", 2)]
    try:
        named = list(named_shapes(folder))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise unreadable(folder, error) from error
    return [name.removesuffix(".weight") for name, shape in named if is_decoder_linear(name, len(shape))]


def shape_of(folder: Path, targets: Sequence[str]) -> ModelShape:
    """ModelError if the configuration has not what is needed. `targets`: lora.targets."""
    if is_gguf(folder):
        return shape_of_gguf(folder, targets)
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        file_bytes = sum(file.stat().st_size for file in weight_files(folder))
        return sizes(config.get("text_config", config), list(named_shapes(folder)), targets, file_bytes)
    except KeyError as error:
        raise ModelError(f"{folder / 'config.json'} has no {error}; check model.path.") from error
    except (AttributeError, TypeError, ValueError, ZeroDivisionError) as error:
        raise unreadable(folder, error) from error


def unreadable(folder: Path, error: Exception) -> ModelError:
    return ModelError(
        f"The sizes of the model in {folder} cannot be read ({type(error).__name__}: {error}); check model.path."
    )


def shape_of_gguf(path: Path, targets: Sequence[str]) -> ModelShape:
    """The size of its weights is that in bf16: the file itself has fewer bits."""
    file = open_gguf(path)
    tensors = [(name, list(shape)) for name, shape in tensor_shapes(file).items()]
    return sizes(config_of(file), tensors, targets, 2 * sum(math.prod(shape) for _, shape in tensors))


def sizes(
    text: Mapping[str, Any], tensors: Sequence[tuple[str, list[int]]], targets: Sequence[str], file_bytes: int
) -> ModelShape:
    """tensors: name and shape."""
    heads, hidden = text["num_attention_heads"], text["hidden_size"]
    width = text.get("head_dim") or hidden // heads
    linear = [(name, shape) for name, shape in tensors if is_decoder_linear(name, len(shape))]
    packed = sum(math.prod(shape) for _, shape in linear)
    return ModelShape(
        linear=packed,
        rest=sum(math.prod(shape) for _, shape in tensors) - packed,
        adapter=sum(sum(shape) for name, shape in linear if name.split(".")[-2] in targets),
        file_bytes=file_bytes,
        layers=text["num_hidden_layers"],
        hidden=hidden,
        key_value=text.get("num_key_value_heads", heads) * width,
        vocabulary=text["vocab_size"],
        heads=heads,
        outputs=sum(shape[0] for _, shape in linear),
        own_layers=text.get("model_type") in OWN_LAYERS,
    )


def named_shapes(folder: Path) -> Iterator[tuple[str, list[int]]]:
    """Name and shape of every tensor."""
    for file in weight_files(folder):
        with file.open("rb") as stream:
            length = min(int.from_bytes(stream.read(8), "little"), MAX_HEADER_BYTES)
            header = json.loads(stream.read(length))
        yield from ((name, entry["shape"]) for name, entry in header.items() if name != "__metadata__")


def adapter_bytes(lora_rank: int, shape: ModelShape) -> int:
    """A and B in fp32."""
    return FP32_BYTES * lora_rank * shape.adapter


def anchor_bytes(lora_rank: int, curriculum: CurriculumConfig, shape: ModelShape) -> int:
    """What a checkpoint keeps of the end of a stage: the adapter of that time, and Fisher's weights in two bytes each,
    as if every matrix had an adapter."""
    return adapter_bytes(lora_rank, shape) * curriculum.anchored + 2 * shape.linear * (curriculum.ewc > 0.0)


def token_bytes(shape: ModelShape) -> int:
    """Keys and values of one token, which are fp32 on a CPU."""
    return 2 * shape.layers * shape.key_value * FP32_BYTES


def layer_outputs(shape: ModelShape) -> int:
    """Values that the products of one layer give for a token."""
    return shape.outputs // shape.layers
