"""What a process asks the driver about its card: which one it is, how much memory is free, how much was used.

    allocated   bytes in tensors
    reserved    bytes that PyTorch took from the driver, caches included
    driver      bytes in use on the whole card by the driver's count: all processes, with their contexts

Allocated and reserved are the peaks of this process since they were read last. The driver keeps no peak: its figure is
of the moment, so it is read at the end of a turn, before caches are released, when it is near the peak of all.

torch is loaded inside the functions, because the launcher imports what imports this module. On a CPU there is no
driver to ask (`driver_of` is None); the tests ask a fake one.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

MIB = 2**20
KERNEL_DRIVER = Path("/proc/driver/nvidia/version")
"""What the kernel's part of the driver says about itself; WSL has no such file."""


@dataclass(frozen=True, kw_only=True)
class CardMemory:
    """Bytes of a card; 0 on a CPU."""

    allocated: int = 0
    reserved: int = 0
    driver: int = 0

    def mib(self) -> dict[str, float]:
        """The same in MiB, by name."""
        return {"allocated": self.allocated / MIB, "reserved": self.reserved / MIB, "driver": self.driver / MIB}


NO_MEMORY = CardMemory()


@dataclass(frozen=True, kw_only=True)
class CardFacts:
    """Which card it is."""

    name: str
    """Such as `NVIDIA H200`."""
    uuid: str
    """`GPU-...`, as nvidia-smi has it: the same in every process and container of the machine."""
    capability: tuple[int, int]
    """Compute capability, such as (8, 6)."""
    driver: str
    """Version of the driver; empty if the kernel does not say."""
    total_bytes: int
    """Memory of the card."""


class Driver(Protocol):
    """What a process asks about the memory of its card."""

    def free_bytes(self) -> int:
        """That no process uses."""
        ...

    def total_bytes(self) -> int: ...

    def peak(self) -> CardMemory:
        """Since the last call or release."""
        ...

    def release(self) -> None:
        """Finish what was started on the card, and give the driver back all memory that is not in use."""
        ...


class CudaDriver:
    """NVIDIA's, through PyTorch."""

    def __init__(self, device: "torch.device") -> None:
        self.device = device

    def free_bytes(self) -> int:
        import torch

        return torch.cuda.mem_get_info(self.device)[0]

    def total_bytes(self) -> int:
        import torch

        return torch.cuda.mem_get_info(self.device)[1]

    def peak(self) -> CardMemory:
        import torch

        free, total = torch.cuda.mem_get_info(self.device)
        found = CardMemory(
            allocated=torch.cuda.max_memory_allocated(self.device),
            reserved=torch.cuda.max_memory_reserved(self.device),
            driver=total - free,
        )
        torch.cuda.reset_peak_memory_stats(self.device)
        return found

    def release(self) -> None:
        import torch

        # What is still queued would compute in the turn of another process.
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        # Only now, since what was cached would count as reserved in the next peak.
        torch.cuda.reset_peak_memory_stats(self.device)


def driver_of(device: "torch.device") -> Driver | None:
    return CudaDriver(device) if device.type == "cuda" else None


def card_facts(device: "torch.device") -> CardFacts:
    import torch

    found = torch.cuda.get_device_properties(device)
    return CardFacts(
        name=found.name,
        uuid=f"GPU-{found.uuid}",
        capability=(found.major, found.minor),
        driver=driver_version(),
        total_bytes=found.total_memory,
    )


def driver_version(file: Path = KERNEL_DRIVER) -> str:
    """`580.65.06`; empty if the kernel does not say."""
    first = file.read_text(encoding="utf-8").partition("\n")[0] if file.is_file() else ""
    found = re.search(r"\b\d{3}\.\d+(\.\d+)?\b", first)
    return found[0] if found else ""
