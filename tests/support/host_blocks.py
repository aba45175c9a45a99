"""The blocks of shared/base/block.py without a card: files that several processes map."""

import secrets
from pathlib import Path

import torch

CARD = "GPU-11111111-2222-3333-4444-555555555555"


class HostBlocks:
    """In a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: dict[int, Path] = {}
        """By address."""

    def make(self, num_bytes: int) -> torch.Tensor:
        """[num_bytes] uint8"""
        file = self.folder / f"block-{secrets.token_hex(8)}"
        block = mapped(file, num_bytes)
        self.files[block.data_ptr()] = file
        return block

    def handle(self, block: torch.Tensor) -> bytes:
        """The name of its file."""
        return str(self.files[block.data_ptr()]).encode()

    def open(self, handle: bytes) -> torch.Tensor:
        """As another process would."""
        file = Path(handle.decode())
        return mapped(file, file.stat().st_size)


def mapped(file: Path, num_bytes: int) -> torch.Tensor:
    return torch.from_file(str(file), shared=True, size=num_bytes, dtype=torch.uint8)


class Closed(HostBlocks):
    """Memory that stays in its process, as in a container of its own."""

    def open(self, handle: bytes) -> torch.Tensor:
        """Never."""
        raise RuntimeError("CUDA error: invalid device context\nDetails")


class Unexported(HostBlocks):
    """Memory that has no handle, as with expandable segments."""

    def handle(self, block: torch.Tensor) -> bytes:
        """Never."""
        raise RuntimeError("expandable_segments cannot be shared")


class Elsewhere(HostBlocks):
    """Handles that mean other memory here."""

    def open(self, handle: bytes) -> torch.Tensor:
        """Zeros."""
        return torch.zeros_like(super().open(handle))
