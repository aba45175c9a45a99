"""Presets: configurations that ship with Tandem, one TOML file each in launch/presets/.

Wherever a command takes a configuration, it takes the name of a preset or the path of a TOML file.
"""

from collections.abc import Iterable
from pathlib import Path

from msgspec import structs

from shared.config.load import read_config
from shared.config.tree import Config
from shared.errors import ConfigError
from shared.process.processor import look_at_capacity, settled

PRESETS_DIR = Path(__file__).parent


def load_config(source: str, overrides: Iterable[str] = (), *, here: bool = True) -> Config:
    """source: a preset's name or a TOML file. overrides: `section.key=value`, applied on top. What [compute] leaves
    open is chosen for this machine; here: whether the run will compute on it."""
    config = read_config(find_source(source), overrides)
    compute = settled(config.compute, config.model, config.pipeline.max_lag, look_at_capacity(), here=here)
    return structs.replace(config, compute=compute)


def find_source(source: str) -> Path:
    preset = PRESETS_DIR / f"{source}.toml"
    if preset.is_file():
        return preset
    path = Path(source)
    if path.is_file():
        return path
    known = ", ".join(sorted(p.stem for p in PRESETS_DIR.glob("*.toml")))
    raise ConfigError(f"There is no preset and no file named '{source}'; presets are: {known}.")
