"""The frozen base as one block of a card's memory, which one process has allocated and another one maps.

    table    which bytes of the block belong to which tensor of the base's file; each begins at a multiple of 512
    views    the block's parts as tensors, in the types that are computed with; loading then has nothing to copy
    handle   what another process needs to map the block: it crosses as msgpack, never as a pickle

Both processes work the table out from the file, so what crosses is compared with what is expected. The JSON that
describes codes is read on the host, and stays there.

`CudaBlocks` calls what PyTorch's own exchange of tensors between processes calls (torch/multiprocessing/reductions.py).
Its allocator refuses where a block cannot be shared: in WSL, with expandable segments, with CUDA's own pool. The tests
have blocks in files of the host.
"""

from collections.abc import Mapping
from itertools import accumulate
from typing import Protocol

import msgspec
import torch

from shared.base.checksum import word_sum
from shared.model.layers.nf4 import PARTS, STATE_KEY
from shared.tensor_file import SAFETENSORS_TYPES

ALIGNMENT = 512
"""Of the tensors, in bytes: as the allocator of a card gives them, which kernels rely on."""
TYPES = {kind: dtype for dtype, kind in SAFETENSORS_TYPES.items()}


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor in the block."""

    name: str
    """As in the file of the base."""
    kind: str
    """Its type, in safetensors' words."""
    shape: tuple[int, ...]
    start: int
    """Of its first byte."""


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """What a block holds."""

    size: int
    """Bytes of the block."""
    entries: tuple[Entry, ...]


def table_of(tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> Table:
    """tensors: of a base's file, on the host. dtype: to compute in."""
    found = {name: tensor for name, tensor in tensors.items() if not name.endswith(STATE_KEY)}
    types = {name: type_in_block(name, tensor, dtype) for name, tensor in found.items()}
    sizes = [aligned(types[name].itemsize * tensor.numel()) for name, tensor in found.items()]
    starts = list(accumulate(sizes, initial=0))
    entries = (
        Entry(name=name, kind=SAFETENSORS_TYPES[types[name]], shape=tuple(tensor.shape), start=start)
        for start, (name, tensor) in zip(starts, found.items(), strict=False)
    )
    return Table(size=starts[-1], entries=tuple(entries))


def aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def type_in_block(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.dtype:
    """Scales of codes keep theirs; all other numbers have the type that is computed in, as loading converts them."""
    is_scale = name.endswith(tuple(f".weight.{part}" for part in PARTS))
    return dtype if tensor.is_floating_point() and not is_scale else tensor.dtype


def views(block: torch.Tensor, table: Table) -> dict[str, torch.Tensor]:
    """block: [size] uint8."""
    found: dict[str, torch.Tensor] = {}
    for entry in table.entries:
        dtype, shape = TYPES[entry.kind], torch.Size(entry.shape)
        part = block[entry.start : entry.start + dtype.itemsize * shape.numel()]
        found[entry.name] = part.view(dtype).view(shape)
    return found


def sums_of(parts: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """As in checksum.py."""
    return {name: word_sum(part) for name, part in parts.items()}


class Blocks(Protocol):
    """Memory that can be shared."""

    def make(self, num_bytes: int) -> torch.Tensor:
        """[num_bytes] uint8"""
        ...

    def handle(self, block: torch.Tensor) -> bytes:
        """RuntimeError or OSError, with the reason, if no other process can have it."""
        ...

    def open(self, handle: bytes) -> torch.Tensor:
        """The block of another process; the same errors."""
        ...


class CudaHandle(msgspec.Struct, frozen=True, kw_only=True):
    """What CUDA and PyTorch need to map a block."""

    memory: bytes
    """Of CUDA: names the allocation that the block is part of."""
    size: int
    """Bytes of the block."""
    offset: int
    """Of the block in its allocation."""
    users: bytes
    """Of PyTorch: a file in shared memory that counts who has the block."""
    users_offset: int
    event: bytes
    """Of CUDA: the moment from which on the block has its content."""
    waits: bool
    """Whether that moment must be waited for."""


class CudaBlocks:
    """Of one card."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def make(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def handle(self, block: torch.Tensor) -> bytes:
        _, memory, size, offset, users, users_offset, event, waits = block.untyped_storage()._share_cuda_()
        found = CudaHandle(
            memory=memory,
            size=size,
            offset=offset,
            users=users,
            users_offset=users_offset,
            event=event,
            waits=waits,
        )
        return msgspec.msgpack.encode(found)

    def open(self, handle: bytes) -> torch.Tensor:
        given = msgspec.msgpack.decode(handle, type=CudaHandle)
        storage = torch.UntypedStorage._new_shared_cuda(
            self.device.index,
            given.memory,
            given.size,
            given.offset,
            given.users,
            given.users_offset,
            given.event,
            given.waits,
        )
        return torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)
