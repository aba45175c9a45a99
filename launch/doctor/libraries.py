"""Facts about the libraries: installed versions and the versions this project allows, what the torch probe reports, and
whether the user's reward function can be imported and called.

The allowed versions are read from pyproject.toml beside the packages (a clone, an image), else from the installed
distribution. There torch has one version, because its kernels decide the last bit of a run; more versions may run
(ADMITTED), because the driver of a card may need an older one, and run.json says which it was. torch, bitsandbytes and
the reward function are tried in a process of their own (probes.py). The reward function gets the environment that a
scoring worker has.
"""

import json
import platform
import sysconfig
import tomllib
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, metadata, version
from pathlib import Path
from typing import TypeVar

import msgspec
from packaging.requirements import Requirement

from actor.scoring.fork_server_process import environment
from actor.verifiers.reward_arguments import NOT_FOR_FUNCTIONS, as_in_the_data
from launch.doctor.finding import Missing
from launch.doctor.probe import ProbeOutput, run_probe
from learner.tasks.sources import GENERATED, as_configured, canonical, canonical_names, known, local_columns
from shared.config.data import TasksConfig, VerifierConfig
from shared.config.named_rewards import is_function
from shared.errors import DataError

PYPROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"
DISTRIBUTION = "tandem-rl"
PROBE = "launch.doctor.probes"
ADMITTED = {"torch": ">=2.11,<2.14"}
"""Wider than what is installed. Runs on different versions have different bits."""
MADE_COLUMNS = ["question", "answer", "level", "subject", "solution"]
"""Of tasks that are generated here."""
T = TypeVar("T", bound=msgspec.Struct)


@dataclass(frozen=True, kw_only=True)
class Library:
    """One dependency."""

    name: str
    """As package indexes spell it."""
    versions: str
    """The allowed versions, such as `>=2.3,<3`."""
    installed: str | None
    """The installed version; None if it is not installed."""


@dataclass(frozen=True, kw_only=True)
class Software:
    """The Python interpreter and the dependencies."""

    python: str
    """Version of this interpreter."""
    python_versions: str
    """The allowed versions."""
    libraries: tuple[Library, ...]
    """All dependencies except those of extras."""
    waits_steadily: bool = True
    """A timed wait ignores changes of the clock. Not so in a Python built against a glibc before 2.30."""


def look_at_software(pyproject: Path = PYPROJECT) -> Software:
    python_versions, requirements = wanted(pyproject)
    return Software(
        python=platform.python_version(),
        python_versions=python_versions,
        libraries=tuple(library(Requirement(text)) for text in requirements if "extra ==" not in text),
        waits_steadily=bool(sysconfig.get_config_var("HAVE_SEM_CLOCKWAIT")),
    )


def wanted(pyproject: Path) -> tuple[str, Iterable[str]]:
    """The allowed Python versions, and the requirements."""
    if pyproject.is_file():
        project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
        return project["requires-python"], project["dependencies"]
    about = metadata(DISTRIBUTION)
    return about["Requires-Python"], about.get_all("Requires-Dist") or []


def library(requirement: Requirement) -> Library:
    try:
        installed = version(requirement.name)
    except PackageNotFoundError:
        installed = None
    versions = ADMITTED.get(requirement.name, str(requirement.specifier))
    return Library(name=requirement.name, versions=versions, installed=installed)


class Driver(msgspec.Struct, frozen=True, kw_only=True, tag="driver", tag_field="stage"):
    """What the library of the card's driver says about itself."""

    cuda: tuple[int, int] | None
    """Newest CUDA version it supports; None without a driver."""


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """A card as PyTorch sees it."""

    name: str
    """Such as `NVIDIA GeForce RTX 3070`."""
    capability: tuple[int, int]
    """Compute capability, such as (8, 6)."""


class TorchBuild(msgspec.Struct, frozen=True, kw_only=True, tag="torch", tag_field="stage"):
    """The installed PyTorch."""

    version: str
    """With the suffix of the build, such as `2.13.0+cu130`."""
    cuda_build: str | None
    """CUDA version it was built for."""
    architectures: tuple[str, ...]
    """The architectures its kernels were compiled for, such as `sm_86` or `compute_90`."""
    devices: tuple[Device, ...]
    """Cards that it can use."""
    cuda_error: str
    """Why it can use no card; empty if it can, or was built without CUDA."""


class RoundTrip(msgspec.Struct, frozen=True, kw_only=True, tag="bitsandbytes", tag_field="stage"):
    """Random weights, quantised to NF4 and dequantised."""

    version: str
    """Of bitsandbytes."""
    device: str
    """`cpu` or `cuda`."""
    round_trip: float
    """Largest error, divided by the largest value of its block."""
    kernel_gap: float
    """Largest difference between the kernels and the formula of the format."""


@dataclass(frozen=True, kw_only=True)
class TorchFacts:
    """The three stages of the torch probe."""

    driver: Driver | Missing
    """First, because an unsuitable driver can make torch fail."""
    torch: TorchBuild | Missing
    """Second."""
    bitsandbytes: RoundTrip | Missing
    """Last."""


def look_at_torch(device: str, limit_s: float) -> TorchFacts:
    """`device`: compute.device of the configuration."""
    return read_stages(run_probe(PROBE, ["torch", device], limit_s))


def read_stages(output: ProbeOutput) -> TorchFacts:
    """The finished stages; for the others, how the probe ended."""
    stages = [msgspec.json.decode(line, type=Driver | TorchBuild | RoundTrip) for line in output.lines]
    missing = Missing(output.trouble or "the probe printed nothing", timed_out=output.timed_out)
    return TorchFacts(
        driver=pick(stages, Driver, missing),
        torch=pick(stages, TorchBuild, missing),
        bitsandbytes=pick(stages, RoundTrip, missing),
    )


def pick(stages: list[Driver | TorchBuild | RoundTrip], kind: type[T], missing: Missing) -> T | Missing:
    return next((stage for stage in stages if isinstance(stage, kind)), missing)


@dataclass(frozen=True, kw_only=True)
class Reward:
    """The user's reward functions."""

    function: str
    """`path/to/file.py:name`, several with commas; empty if nothing but a built-in verifier is configured."""
    trouble: str
    """Why it cannot be imported or called; empty if it can."""
    timed_out: bool = False
    """Whether the import took too long."""


def look_at_reward(verifier: VerifierConfig, tasks: TasksConfig, limit_s: float) -> Reward:
    """Imports each file in a process of its own, as a scoring worker does, up to the first that fails."""
    names = json.dumps(names_for_functions(tasks))
    own = [verifier.function] if verifier.kind == "callable" else []
    specs = [spec for spec in (*own, *verifier.rewards) if spec and (spec in own or is_function(spec))]
    for spec in specs:
        output = run_probe(PROBE, ["reward", spec, names], limit_s, environment(verifier.environment))
        if output.trouble:
            return Reward(function=spec, trouble=output.trouble, timed_out=output.timed_out)
    return Reward(function=", ".join(specs), trouble="")


def names_for_functions(tasks: TasksConfig) -> list[str]:
    """Of all columns that reward functions may get; empty if the data are not on this machine."""
    found = MADE_COLUMNS if tasks.source in GENERATED else []
    # The check of the data says what is wrong with them.
    with suppress(DataError):
        found = found or local_columns("tasks.source", tasks.source, tasks.split or known(tasks.source).split)
    row = canonical(dict.fromkeys(found, ""), canonical_names(as_configured(tasks.source, tasks)))
    # An answer may be a solution with marks that are taken apart.
    return [*(as_in_the_data(row).keys() - NOT_FOR_FUNCTIONS), "solution", "level"] if found else []
