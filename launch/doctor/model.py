"""Facts about the configured model and its tasks: what is on this machine, the folders it will be kept in, and what the
Hugging Face hub says about a model that has to be fetched. Only the look at the hub uses a network.

If the hub cannot be reached, the error is not caught here: it becomes the reason of a `Missing` fact.
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from launch.doctor.disk import Folder, look_at_folder
from launch.doctor.finding import Missing
from shared.base.gguf import config_of, is_gguf, open_gguf, tensor_shapes
from shared.config.data import TasksConfig
from shared.config.model import ModelConfig, cache_root
from shared.embedded import EMBEDDED_DIR
from shared.errors import ModelError
from shared.model.linears import is_decoder_linear

if TYPE_CHECKING:
    from huggingface_hub import HfApi

TASK_FORMATS = (".jsonl", ".json", ".csv", ".parquet")
MAX_HEADER_BYTES = 100 * 2**20
TIMEOUT_S = 4.0


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """What the files of a checkpoint say about its size."""

    linear: int
    """Parameters in the matrices of the layers: what NF4 packs."""
    rest: int
    """All others: embedding, head, norms."""
    adapter: int
    """Rows and columns of the matrices that get an adapter: its parameters for each unit of rank."""
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


@dataclass(frozen=True, kw_only=True)
class Model:
    """What is on this machine already."""

    kind: Literal["embedded", "folder", "gguf", "hub"]
    """Where it comes from."""
    folder: Path | None
    """Its folder or its .gguf file; None if it has to be fetched."""
    shape: ModelShape | Missing
    """Its size."""
    base_cache: Folder
    """Where the quantised base will be kept."""
    hub_cache: Folder
    """Where the library of the hub keeps what it fetches."""
    offline: bool
    """Whether HF_HUB_OFFLINE or a similar variable is set."""
    missing_files: tuple[str, ...]
    """Task files of the configuration that do not exist."""


def look_at_model(model: ModelConfig, targets: Sequence[str], tasks: TasksConfig) -> Model:
    """Uses no network. `targets`: lora.targets."""
    from huggingface_hub import constants

    folder = local_folder(model)
    files = (tasks.source, tasks.held_out, tasks.test)
    return Model(
        kind=kind_of(model),
        folder=folder,
        shape=shape_of(folder, targets) if folder else Missing("the model is not on this machine yet"),
        base_cache=look_at_folder(cache_root(model).absolute()),
        hub_cache=look_at_folder(Path(constants.HF_HUB_CACHE).absolute()),
        offline=constants.is_offline_mode(),
        missing_files=tuple(file for file in files if Path(file).suffix in TASK_FORMATS and not Path(file).is_file()),
    )


def kind_of(model: ModelConfig) -> Literal["embedded", "folder", "gguf", "hub"]:
    """As shared/base/cache.py reads model.path."""
    if model.path == "embedded":
        return "embedded"
    if is_gguf(model.path):
        return "gguf"
    return "folder" if Path(model.path).is_dir() else "hub"


def local_folder(model: ModelConfig) -> Path | None:
    """The folder of the checkpoint, or its file; None unless all of it is on this machine."""
    match kind_of(model):
        case "gguf":
            return Path(model.path) if Path(model.path).is_file() else None
        case "embedded":
            folder = EMBEDDED_DIR
        case "folder":
            folder = Path(model.path)
        case "hub":
            folder = in_hub_cache(model)
    complete = folder and (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))
    return folder if complete else None


def in_hub_cache(model: ModelConfig) -> Path | None:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(model.path, "config.json", revision=model.revision)
    except HFValidationError:
        # Not a hub id, so the cache cannot have it.
        return None
    return Path(found).parent if isinstance(found, str) else None


def shape_of(folder: Path, targets: Sequence[str]) -> ModelShape | Missing:
    """Reads config.json and the headers of the weight files, but no weights."""
    if is_gguf(folder):
        return shape_of_gguf(folder, targets)
    config = read_config(folder)
    file_bytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    try:
        return shape_from(config.get("text_config", config), list(named_shapes(folder)), targets, file_bytes)
    except KeyError as error:
        return Missing(f"{folder / 'config.json'} has no {error}")


def shape_of_gguf(path: Path, targets: Sequence[str]) -> ModelShape | Missing:
    """The size of its weights is that in bf16: the file itself has fewer bits."""
    try:
        file = open_gguf(path)
        tensors = [(name, list(shape)) for name, shape in tensor_shapes(file).items()]
        return shape_from(config_of(file), tensors, targets, 2 * sum(math.prod(shape) for _, shape in tensors))
    except ModelError as error:
        return Missing(str(error))


def shape_from(
    config: dict[str, Any], tensors: Sequence[tuple[str, list[int]]], targets: Sequence[str], file_bytes: int
) -> ModelShape:
    """tensors: name and shape."""
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    width = config.get("head_dim") or hidden // heads
    linear = [(name, shape) for name, shape in tensors if is_decoder_linear(name, len(shape))]
    packed = sum(math.prod(shape) for _, shape in linear)
    return ModelShape(
        linear=packed,
        rest=sum(math.prod(shape) for _, shape in tensors) - packed,
        adapter=sum(sum(shape) for name, shape in linear if name.split(".")[-2] in targets),
        file_bytes=file_bytes,
        layers=config["num_hidden_layers"],
        hidden=hidden,
        key_value=config.get("num_key_value_heads", heads) * width,
        vocabulary=config["vocab_size"],
    )


def read_config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))


def named_shapes(folder: Path) -> Iterator[tuple[str, list[int]]]:
    """Name and shape of every tensor."""
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as stream:
            length = min(int.from_bytes(stream.read(8), "little"), MAX_HEADER_BYTES)
            header = json.loads(stream.read(length))
        yield from ((name, entry["shape"]) for name, entry in header.items() if name != "__metadata__")


@dataclass(frozen=True, kw_only=True)
class Hub:
    """What the hub says about the model."""

    found: bool
    """The model and its revision exist, and this token may see them."""
    gated: bool
    """The owner of the model has to grant access."""
    admitted: bool
    """This token may fetch the model."""
    token: bool
    """There is a token on this machine."""
    num_bytes: int | None
    """Size of its weight files; None if the hub did not say."""


def ask_hub(model: ModelConfig) -> Hub | Missing:
    """Asks only about a model that has to be fetched."""
    if kind_of(model) != "hub":
        return Missing("not asked: model.path is not a hub id")
    if local_folder(model):
        return Missing("not asked: the model is on this machine")
    return look_at_hub(model)


def look_at_hub(model: ModelConfig, endpoint: str | None = None) -> Hub:
    """One request, and a second one if the model is gated. `endpoint`: None for the one that huggingface_hub uses."""
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    token, hub = get_token() is not None, HfApi(endpoint)
    try:
        info = hub.model_info(model.path, revision=model.revision, timeout=TIMEOUT_S, files_metadata=True)
    except GatedRepoError:
        return Hub(found=True, gated=True, admitted=False, token=token, num_bytes=None)
    except (RepositoryNotFoundError, RevisionNotFoundError, HFValidationError):
        return Hub(found=False, gated=False, admitted=False, token=token, num_bytes=None)
    sizes = [file.size or 0 for file in info.siblings or [] if file.rfilename.endswith(".safetensors")]
    gated = bool(info.gated)
    return Hub(
        found=True,
        gated=gated,
        admitted=not gated or admitted(model, hub),
        token=token,
        num_bytes=sum(sizes) or None,
    )


def admitted(model: ModelConfig, hub: "HfApi") -> bool:
    from huggingface_hub.errors import GatedRepoError

    try:
        hub.auth_check(model.path)
    except GatedRepoError:
        return False
    return True
