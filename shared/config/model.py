"""Where quantised bases are kept. Apart from `base_cache.py`, so that it can be asked without torch."""

import os
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from shared.config.types import PositiveFloat, Section
from shared.errors import ConfigError


class ModelConfig(Section, frozen=True, kw_only=True):
    """The frozen base."""

    path: str = "embedded"
    """`embedded`, a folder in Hugging Face format, or a hub id (then fetched once into the hub's own cache)."""
    revision: str = "main"
    """Hub revision; pin a commit for runs that must repeat."""
    quantization: Literal["nf4", "none"] = "nf4"
    """`nf4`: bitsandbytes, block 64, double quantisation. `none`: the checkpoint's own weights, for comparison."""
    dequantize: Literal["auto", "once", "each_call"] = "auto"
    """Keep the dequantised values in memory, or recompute them in every call; the numbers are the same.
    `auto` holds them on CPU only."""
    cache_dir: str = ""
    """Where quantised bases are kept; empty means $XDG_CACHE_HOME/tandem or ~/.cache/tandem."""


class LoraConfig(Section, frozen=True, kw_only=True):
    """The adapter: Y = W4(x) + alpha/rank * B(A(x)), B = 0 at the start."""

    rank: Annotated[int, Meta(ge=1, le=512)] = 16
    """R."""
    alpha: PositiveFloat = 32.0
    """Scale numerator."""
    targets: Annotated[tuple[str, ...], Meta(min_length=1)] = (
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    )
    """Last names of the linears that get an adapter."""


PLACE = "model.cache_dir"
"""The key that names another folder."""


def cache_root(model: ModelConfig) -> Path:
    """As configured, else in the user's cache folder. XDG_CACHE_HOME counts only as an absolute path, as its standard
    says, so that an empty one does not mean the folder where the command was typed."""
    if model.cache_dir:
        return Path(model.cache_dir)
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (cache if cache.is_absolute() else home() / ".cache") / "tandem"


def home() -> Path:
    """The user's home folder. A container's user may have neither HOME nor an entry in the list of users."""
    try:
        return Path.home()
    except RuntimeError as error:
        raise ConfigError(
            f"User {os.getuid()} has no home folder to keep quantised models in; set {PLACE}, HOME or XDG_CACHE_HOME."
        ) from error
