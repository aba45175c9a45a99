"""The configured model as far as it is on this machine, the folders it will be in, the task file; and what the Hugging
Face hub says about a model that is not here yet, the only look that uses a network.

A hub that cannot be reached is no answer: the error is left to raise, and becomes the reason why there is none.
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from launch.doctor.estimate import ModelShape
from launch.doctor.facts.disk import Folder, look_at_folder
from launch.doctor.finding import Missing
from shared.config.model import ModelConfig, cache_root
from shared.config.tree import Config
from shared.embedded import EMBEDDED_DIR
from shared.model.linears import is_decoder_linear

if TYPE_CHECKING:
    from huggingface_hub import HfApi


TASK_FORMATS = (".jsonl", ".json", ".csv", ".parquet")
MAX_HEADER_BYTES = 100 * 2**20
TIMEOUT_S = 4.0


@dataclass(frozen=True, kw_only=True)
class Model:
    """What is here already."""

    kind: Literal["embedded", "folder", "hub"]
    """Where it comes from."""
    folder: Path | None
    """Where it lies; None if it has to be fetched."""
    shape: ModelShape | Missing
    """Its size."""
    base_cache: Folder
    """Where the quantised base will lie."""
    hub_cache: Folder
    """Where the hub's library puts what it fetches."""
    offline: bool
    """HF_HUB_OFFLINE or its like is set."""
    lost_files: tuple[str, ...]
    """Task files that the configuration names and that are not there."""


def look_at_model(config: Config) -> Model:
    """Without a network."""
    from huggingface_hub import constants

    kind = kind_of(config.model)
    folder = local_folder(config.model)
    files = (config.tasks.source, config.tasks.held_out, config.tasks.test)
    return Model(
        kind=kind,
        folder=folder,
        shape=shape_of(folder, config.lora.targets) if folder else Missing("the model is not on this machine yet"),
        base_cache=look_at_folder(cache_root(config.model).absolute()),
        hub_cache=look_at_folder(Path(constants.HF_HUB_CACHE).absolute()),
        offline=constants.is_offline_mode(),
        lost_files=tuple(file for file in files if Path(file).suffix in TASK_FORMATS and not Path(file).is_file()),
    )


def kind_of(model: ModelConfig) -> Literal["embedded", "folder", "hub"]:
    """As base_cache.py reads `model.path`."""
    if model.path == "embedded":
        return "embedded"
    return "folder" if Path(model.path).is_dir() else "hub"


def local_folder(model: ModelConfig) -> Path | None:
    """The checkpoint where it is whole on this machine."""
    match kind_of(model):
        case "embedded":
            folder = EMBEDDED_DIR
        case "folder":
            folder = Path(model.path)
        case "hub":
            folder = in_hub_cache(model)
    whole = folder and (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))
    return folder if whole else None


def in_hub_cache(model: ModelConfig) -> Path | None:
    """Its folder in the hub's own cache. A path that is no hub id cannot be there."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(model.path, "config.json", revision=model.revision)
    except HFValidationError:
        return None
    return Path(found).parent if isinstance(found, str) else None


def shape_of(folder: Path, targets: Sequence[str]) -> ModelShape | Missing:
    """From config.json and the headers of the weight files; no weight is read."""
    config = read_config(folder)
    text = config.get("text_config", config)
    try:
        heads, hidden = text["num_attention_heads"], text["hidden_size"]
        width = text.get("head_dim") or hidden // heads
        tensors = list(named_shapes(folder))
        linear = [(name, shape) for name, shape in tensors if is_decoder_linear(name, len(shape))]
        packed = sum(math.prod(shape) for _, shape in linear)
        return ModelShape(
            linear=packed,
            rest=sum(math.prod(shape) for _, shape in tensors) - packed,
            adapter=sum(sum(shape) for name, shape in linear if name.split(".")[-2] in targets),
            file_bytes=sum(file.stat().st_size for file in folder.glob("*.safetensors")),
            layers=text["num_hidden_layers"],
            hidden=hidden,
            key_value=text.get("num_key_value_heads", heads) * width,
            vocabulary=text["vocab_size"],
        )
    except KeyError as error:
        return Missing(f"{folder / 'config.json'} has no {error}")


def read_config(folder: Path) -> dict[str, Any]:
    """config.json."""
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))


def named_shapes(folder: Path) -> Iterator[tuple[str, list[int]]]:
    """Of every tensor."""
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as stream:
            length = min(int.from_bytes(stream.read(8), "little"), MAX_HEADER_BYTES)
            header = json.loads(stream.read(length))
        yield from ((name, entry["shape"]) for name, entry in header.items() if name != "__metadata__")


@dataclass(frozen=True, kw_only=True)
class Hub:
    """Its answer."""

    found: bool
    """Model and revision exist, and are not hidden from this token."""
    gated: bool
    """Access has to be granted by its owner."""
    admitted: bool
    """The token here may fetch it."""
    token: bool
    """There is a token."""
    num_bytes: int | None
    """Of its weight files; None if the hub did not say."""


def look_at_hub(model: ModelConfig, endpoint: str | None = None) -> Hub:
    """One question, and a second one where the model is gated. Without an endpoint, the one that is configured."""
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
    """Whether the hub would hand the files to this token."""
    from huggingface_hub.errors import GatedRepoError

    try:
        hub.auth_check(model.path)
    except GatedRepoError:
        return False
    return True
