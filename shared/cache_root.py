"""Where quantised bases live. Apart from `base_cache.py`, so that it can be asked without torch."""

import os
from pathlib import Path

from shared.config import ModelConfig


def cache_root(model: ModelConfig) -> Path:
    """As configured, else in the user's cache folder."""
    if model.cache_dir:
        return Path(model.cache_dir)
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "tandem"
