"""The sections [model] and [lora], the folders where quantised bases and fetched models are kept, and the files of a
model. No torch here."""

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from shared.config.types import PositiveFloat, Section
from shared.errors import ConfigError, ModelError, in_words


class ModelConfig(Section, frozen=True, kw_only=True):
    """The frozen base."""

    path: str = "embedded"
    """`embedded`, `embedded-tools`, a folder in Hugging Face format, a .gguf file of a Llama, Qwen2 or Qwen3 (extra
    `gguf`), or a hub id, which is downloaded once into the hub's own cache."""
    revision: str = "main"
    """Revision on the hub. Give a commit for runs that must be repeatable."""
    quantization: Literal["nf4", "none"] = "nf4"
    """`nf4`: bitsandbytes, blocks of 64, double quantisation. `none`: the model's own weights, for comparison."""
    dequantize: Literal["auto", "once", "each_call"] = "auto"
    """`once`: keep the dequantised values in memory. `each_call`: recompute them in every call; less memory, more time,
    the same numbers. `auto` takes `once` on a CPU and `each_call` on a card."""
    cache_dir: str = ""
    """Folder for quantised bases. If empty, $XDG_CACHE_HOME/tandem or ~/.cache/tandem."""

    def __post_init__(self) -> None:
        self.expand_home("path", "cache_dir")


Rank = Annotated[int, Meta(ge=1, le=512)]


class LoraConfig(Section, frozen=True, kw_only=True):
    """The adapter: y = W x + alpha / rank * B (A x), with B = 0 at the start unless it starts from another adapter."""

    rank: Rank = 16
    """R, the inner dimension of A and B. From 1 to 512."""
    ranks: dict[str, Rank] = msgspec.field(default_factory=dict[str, int])
    """R of single targets, for example {q_proj = 8}; the others have `rank`. alpha is the same for all. Not for vLLM,
    which takes one rank."""
    alpha: PositiveFloat = 32.0
    """Numerator of the scale."""
    rslora: bool = False
    """Divide by the square root of the rank instead of the rank (rsLoRA, 2312.03732), so that a large rank learns as
    fast as a small one. The scale is larger, so lower `alpha` or the rate for a comparison."""
    start_from: str = ""
    """Adapter that the run starts from, and that it trains on: a folder or hub id with an adapter in PEFT's format, or
    a run, whose newest checkpoint is taken. It is copied into the run. Base, ranks, scale and targets must be those of
    this section. If empty, A is drawn by run.seed and B is 0. See also curriculum.kl_to."""
    targets: Annotated[tuple[str, ...], Meta(min_length=1)] = (
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    )
    """Linears that get an adapter, by the last part of their name."""

    def __post_init__(self) -> None:
        self.expand_home("start_from")

    def __hash__(self) -> int:
        """By content: a dictionary alone has no hash, and plans are kept by it."""
        return hash((type(self), msgspec.json.encode(self, order="sorted")))

    def rank_of(self, layer: str) -> int:
        """layer: its name, or the target's."""
        return self.ranks.get(layer.rpartition(".")[2], self.rank)

    def scale_of(self, layer: str) -> float:
        """What B (A x) is multiplied by."""
        rank = self.rank_of(layer)
        return self.alpha / (math.sqrt(rank) if self.rslora else rank)

    @property
    def largest_rank(self) -> int:
        return max(map(self.rank_of, self.targets))


CACHE_DIR_KEY = "model.cache_dir"
"""The key that names another folder."""


def cache_root(
    model: ModelConfig, environment: Mapping[str, str] = os.environ, home: Callable[[], Path] = Path.home
) -> Path:
    """model.cache_dir, or else a folder in the user's cache. XDG_CACHE_HOME counts only as an absolute path, as its
    standard says: an empty one must not mean the current folder."""
    if model.cache_dir:
        return Path(model.cache_dir)
    cache = Path(environment.get("XDG_CACHE_HOME", ""))
    if cache.is_absolute():
        return cache / "tandem"
    try:
        return home() / ".cache" / "tandem"
    except RuntimeError as error:  # a container's user may have neither HOME nor an entry in the list of users
        raise ConfigError(
            f"User {os.getuid()} has no home folder for quantised models; set {CACHE_DIR_KEY}, HOME or XDG_CACHE_HOME."
        ) from error


def in_hub_cache(model: ModelConfig, hub_cache: Path) -> Path:
    """Where the hub's library keeps this revision once it was fetched."""
    repository = hub_cache / f"models--{model.path.replace('/', '--')}"
    named = repository / "refs" / model.revision
    # Unlike Path's, this one says no to a name that no file can have.
    commit = named.read_text(encoding="utf-8").strip() if os.path.isfile(named) else model.revision
    return repository / "snapshots" / commit


def hub_cache_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """As huggingface_hub finds it, without importing it."""
    home = environment.get("HF_HOME") or Path(environment.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    # Unlike Path's, this one leaves a user alone who has no home.
    return Path(os.path.expanduser(environment.get("HF_HUB_CACHE") or Path(home, "hub"))).absolute()


SECOND_COPY = "consolidated"
"""Begins the names of files in which some publishers repeat all weights, under names of their own."""
INDEX = "model.safetensors.index.json"


def is_path(name: str) -> bool:
    """Whether it is written as a path, and so is no hub id."""
    return name.startswith(("/", ".", "~"))


def weight_files(folder: Path) -> list[Path]:
    """The files with a model's weights, as transformers chooses them: the one file, or those of the index. Without
    both, all *.safetensors files. ModelError if the index cannot be read."""
    if (whole := folder / "model.safetensors").is_file():
        return [whole]
    index = folder / INDEX
    if not index.is_file():
        return sorted(file for file in folder.glob("*.safetensors") if not file.name.startswith(SECOND_COPY))
    try:
        return sorted({folder / name for name in json.loads(index.read_bytes())["weight_map"].values()})
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{index} is not an index of weights ({in_words(error)}); get that file again.") from error
