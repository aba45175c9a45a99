"""Where quantised bases are kept. Apart from `base_cache.py`, so that it can be asked without torch."""

import os
from pathlib import Path

from shared.config import ModelConfig
from shared.errors import ConfigError

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
