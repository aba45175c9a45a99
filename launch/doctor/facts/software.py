"""Versions that are here, the windows that this project asks for, and the user's reward function.

The windows are read from pyproject.toml beside the packages (a clone, an image), else from the installed distribution.
Whether the function can be imported is tried in a process of its own, which sees what a scoring worker sees.
"""

import platform
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, metadata, version
from pathlib import Path

from packaging.requirements import Requirement

from actor.scoring.keeper_process import environment
from launch.doctor.probe import ask
from shared.config.data import VerifierConfig

PYPROJECT = Path(__file__).resolve().parents[3] / "pyproject.toml"
DISTRIBUTION = "tandem-rl"
PROBE = "launch.doctor.probes"


@dataclass(frozen=True, kw_only=True)
class Library:
    """One dependency."""

    name: str
    """As indexes know it."""
    window: str
    """The versions that are asked for, such as `>=2.3,<3`."""
    installed: str | None
    """The version that is here; None if it is not."""


@dataclass(frozen=True, kw_only=True)
class Software:
    """What runs the code."""

    python: str
    """Version of this interpreter."""
    python_window: str
    """The versions that are asked for."""
    libraries: tuple[Library, ...]
    """Every dependency of the product, extras left out."""


def look_at_software(pyproject: Path = PYPROJECT) -> Software:
    """Of this interpreter."""
    python_window, requirements = wanted(pyproject)
    return Software(
        python=platform.python_version(),
        python_window=python_window,
        libraries=tuple(library(Requirement(text)) for text in requirements if "extra ==" not in text),
    )


def wanted(pyproject: Path) -> tuple[str, Iterable[str]]:
    """Window of Python, requirements."""
    if pyproject.is_file():
        project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
        return project["requires-python"], project["dependencies"]
    about = metadata(DISTRIBUTION)
    return about["Requires-Python"], about.get_all("Requires-Dist") or []


def library(requirement: Requirement) -> Library:
    """One requirement and what is here of it."""
    try:
        installed = version(requirement.name)
    except PackageNotFoundError:
        installed = None
    return Library(name=requirement.name, window=str(requirement.specifier), installed=installed)


@dataclass(frozen=True, kw_only=True)
class Reward:
    """What came of it."""

    function: str
    """`path/to/file.py:name`; empty if a built-in verifier is configured."""
    trouble: str
    """Why it cannot be used; empty if it can."""


def look_at_reward(verifier: VerifierConfig, limit_s: float) -> Reward:
    """Imports the file as a scoring worker does."""
    if verifier.kind != "callable":
        return Reward(function="", trouble="")
    return Reward(
        function=verifier.function,
        trouble=ask(PROBE, ["reward", verifier.function], limit_s, environment(verifier.environment)).trouble,
    )
