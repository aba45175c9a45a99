"""What the torch probe told: the driver, PyTorch's build and cards, a bitsandbytes round trip."""

from dataclasses import dataclass
from typing import TypeVar

import msgspec

from launch.doctor.known import Missing
from launch.doctor.probe import Told, ask

PROBE = "launch.doctor.probes.torch_probe"
T = TypeVar("T", bound=msgspec.Struct)


class Driver(msgspec.Struct, frozen=True, kw_only=True, tag="driver", tag_field="stage"):
    """The card's driver as its own library tells of it."""

    cuda: tuple[int, int] | None
    """Newest CUDA it can serve; None without a driver."""


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """A card as PyTorch sees it."""

    name: str
    """Its maker's name for it."""
    capability: tuple[int, int]
    """Compute capability, such as (8, 6)."""


class TorchBuild(msgspec.Struct, frozen=True, kw_only=True, tag="torch", tag_field="stage"):
    """PyTorch as it is here."""

    version: str
    """With the build's suffix."""
    cuda_build: str | None
    """CUDA version it was built for."""
    architectures: tuple[str, ...]
    """What its kernels were compiled for, such as `sm_86` or `compute_90`."""
    devices: tuple[Device, ...]
    """Cards that it can use."""
    cuda_error: str
    """Why it can use none; empty if it can, or was not built to."""


class RoundTrip(msgspec.Struct, frozen=True, kw_only=True, tag="bitsandbytes", tag_field="stage"):
    """Random weights to NF4 and back."""

    version: str
    """Of bitsandbytes."""
    device: str
    """Where: `cpu` or `cuda`."""
    round_trip: float
    """Largest error, in units of the largest value of its block."""
    kernel_gap: float
    """Largest difference between its kernels and the format's formula."""


@dataclass(frozen=True, kw_only=True)
class TorchFacts:
    """The three stages."""

    driver: Driver | Missing
    """First, since loading torch may fail for its sake."""
    torch: TorchBuild | Missing
    """Second."""
    bitsandbytes: RoundTrip | Missing
    """Last."""


def look_at_torch(device: str, limit_s: float) -> TorchFacts:
    """Ask a process of its own; `device` is the configured one."""
    return stages(ask(PROBE, [device], limit_s))


def stages(told: Told) -> TorchFacts:
    """Each stage that was finished, and for the others how the probe ended."""
    said = [msgspec.json.decode(line, type=Driver | TorchBuild | RoundTrip) for line in told.lines]
    return TorchFacts(
        driver=pick(said, Driver, told), torch=pick(said, TorchBuild, told), bitsandbytes=pick(said, RoundTrip, told)
    )


def pick(said: list[Driver | TorchBuild | RoundTrip], kind: type[T], told: Told) -> T | Missing:
    """The stage of this kind."""
    found = [stage for stage in said if isinstance(stage, kind)]
    return found[0] if found else Missing(told.trouble or "the probe said nothing")
