"""Files of tensors in safetensors' format, written in an order of our own, and mapped.

    8 bytes length of the JSON,  JSON: type, shape and place of every tensor,  the tensors

Mapped files: all processes share the pages, and none has a copy of its own. `safetensors` maps files too, but its
tensors cannot be joined. Here all tensors are views of one mapping, so matrices that follow each other in the file are
one matrix. `header` is for files whose tensors are made one after another. `tensor_bytes` takes half of the memory and
time of `safetensors.torch.save`, which copies everything twice.
"""

import json
import mmap
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from shared.run.files import FileParts

SAFETENSORS_TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
ALIGNMENT = 64
"""Bytes; the first tensor begins at a multiple of it, and so do the others of a usual model, by their sizes."""


class Entry(Protocol):
    """A tensor that is written."""

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> torch.Size: ...

    @property
    def dtype(self) -> torch.dtype: ...


def header(plan: Sequence[Entry]) -> bytes:
    """The length of the JSON, and the JSON."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in plan:
        start, end = end, end + tensor.shape.numel() * tensor.dtype.itemsize
        kind = SAFETENSORS_TYPES[tensor.dtype]
        entries[tensor.name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(entries).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


@dataclass(frozen=True, kw_only=True)
class Named:
    """Name, shape and type of a tensor that is written."""

    name: str
    shape: torch.Size
    dtype: torch.dtype


def tensor_bytes(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """A file of these tensors: wide types first, then by name. Equal tensors give equal bytes."""
    return b"".join(tensor_parts(tensors))


def tensor_parts(tensors: Mapping[str, torch.Tensor]) -> FileParts:
    """The same, in the memory of these tensors."""
    return list(file_parts(dict(sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])))))


def file_parts(tensors: Mapping[str, torch.Tensor]) -> Iterator[bytes | memoryview]:
    """The parts of a file of these tensors, in this order. Tensors that are contiguous are not copied."""
    yield header([Named(name=name, shape=tensor.shape, dtype=tensor.dtype) for name, tensor in tensors.items()])
    yield from map(values_of, tensors.values())


def save_tensors(tensors: Mapping[str, torch.Tensor], file: Path) -> None:
    """Write in safetensors' format. Its own error for a full or faulty disk becomes an OSError."""
    try:
        save_file(dict(tensors), file, metadata={"format": "pt"})
    except SafetensorError as error:
        refused = re.search(r"os error (\d+)", str(error))
        if refused is None:
            raise
        raise OSError(int(refused[1]), os.strerror(int(refused[1]))) from error


def values_of(tensor: torch.Tensor) -> memoryview:
    """Its bytes in a file."""
    return tensor.contiguous().flatten().view(torch.uint8).numpy().data


@dataclass(frozen=True, kw_only=True)
class MappedFile:
    """A file and its tensors."""

    pages: mmap.mmap
    tensors: dict[str, torch.Tensor]

    def release(self) -> None:
        """The pages leave this process until they are read again."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self.pages.madvise(mmap.MADV_DONTNEED)


def map_file(file: Path) -> MappedFile:
    """The mapping is private and may be written to, because PyTorch asks for that; nothing writes to it, so its pages
    are shared."""
    with file.open("rb") as opened:
        pages = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
    length = int.from_bytes(pages[:8], "little")
    entries: dict[str, Any] = json.loads(pages[8 : 8 + length])
    entries.pop("__metadata__", None)
    whole = torch.frombuffer(pages, dtype=torch.uint8)[8 + length :]
    types = {kind: dtype for dtype, kind in SAFETENSORS_TYPES.items()}
    tensors = {
        name: whole[slice(*entry["data_offsets"])].view(types[entry["dtype"]]).view(entry["shape"])
        for name, entry in entries.items()
    }
    return MappedFile(pages=pages, tensors=tensors)


def neighbours(matrices: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """The matrix of those that follow each other in a mapped file, or None."""
    found = [matrix for matrix in matrices if matrix is not None]
    if len(found) < len(matrices):
        return None
    for one, other in pairwise(found):
        same = one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
        if not same or other.data_ptr() != one.data_ptr() + one.nbytes:
            return None
    first = found[0]
    return first.as_strided((sum(len(matrix) for matrix in found), first.shape[1]), first.stride())
