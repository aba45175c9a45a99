"""Facts about the configured model and its tasks: what is on this machine, the folders it will be kept in, and what the
Hugging Face hub says about a model that has to be fetched. Only the look at the hub uses a network.

If the hub cannot be reached, the error is not caught here: it becomes the reason of a `Missing` fact.
"""

import glob
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from launch.doctor.disk import Folder, look_at_folder
from launch.doctor.finding import Missing
from launch.plan.shape import ModelShape, check_model, kind_of, local_folder, shape_of
from launch.presets.load import check_tasks
from shared.config.data import TasksConfig, VerifierKind
from shared.config.model import SECOND_COPY, ModelConfig, cache_root
from shared.errors import ModelError, UserError

if TYPE_CHECKING:
    from huggingface_hub import HfApi

DIGEST = 16 * "[0-9a-f]"
"""At the end of a name in the cache, as a pattern."""
TIMEOUT_S = 4.0
UNKNOWN_MODEL_BYTES = 2 * 2**30
"""What a model may need if neither its files nor the hub say how large it is."""


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
    cached: frozenset[str]
    """What is kept there already: the quantisation, and number types of the dense base. Perhaps of older files."""
    hub_cache: Folder
    """Where the library of the hub keeps what it fetches."""
    offline: bool
    """Whether HF_HUB_OFFLINE or a similar variable is set."""
    trouble: str
    """Why a run would refuse it: no such place, or no such lora.targets; empty if it would not."""
    tasks_trouble: str
    """Why local data cannot be used; empty if they can."""


def look_at_model(model: ModelConfig, targets: Sequence[str], tasks: TasksConfig, kind: VerifierKind) -> Model:
    """Uses no network. `targets`: lora.targets."""
    from huggingface_hub import constants

    hub_cache = Path(constants.HF_HUB_CACHE).absolute()
    folder = local_folder(model, hub_cache)
    return Model(
        kind=kind_of(model),
        folder=folder,
        shape=shape_or_reason(folder, targets),
        base_cache=look_at_folder(cache_root(model).absolute()),
        cached=cached_parts(folder, model) if folder else frozenset(),
        hub_cache=look_at_folder(hub_cache),
        offline=constants.is_offline_mode(),
        trouble=said(lambda: check_model(model, targets)),
        tasks_trouble=said(lambda: check_tasks(tasks, kind, tested=True)),
    )


def said(check: Callable[[], None]) -> str:
    """The sentence with which it refuses; empty if it does not."""
    try:
        check()
    except UserError as error:
        return str(error)
    return ""


def cached_parts(folder: Path, model: ModelConfig) -> frozenset[str]:
    """By the names that shared/base/cache.py gives. The digests in them would need the files and torch."""
    source = f"{glob.escape(folder.stem)}-gguf-*" if kind_of(model) == "gguf" else glob.escape(folder.name)
    base = f"{source}-{model.quantization}-{DIGEST}"
    names = {model.quantization: base, **{dtype: f"{base}-{dtype}-{DIGEST}" for dtype in ("fp32", "bf16")}}
    return frozenset(part for part, name in names.items() if any(cache_root(model).glob(name)))


def weight_bytes(model: Model) -> int:
    """Of its weight files, or a guess; the quantised base may be as large."""
    return UNKNOWN_MODEL_BYTES if isinstance(model.shape, Missing) else model.shape.file_bytes


def shape_or_reason(folder: Path | None, targets: Sequence[str]) -> ModelShape | Missing:
    if folder is None:
        return Missing("the model is not on this machine yet")
    try:
        return shape_of(folder, targets)
    except ModelError as error:
        return Missing(str(error))


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
    from huggingface_hub import constants

    if kind_of(model) != "hub":
        return Missing("not asked: model.path is not a hub id")
    if local_folder(model, Path(constants.HF_HUB_CACHE)):
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
    weights = [file for file in info.siblings or [] if file.rfilename.endswith(".safetensors")]
    sizes = [file.size or 0 for file in weights if not file.rfilename.startswith(SECOND_COPY)]
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
