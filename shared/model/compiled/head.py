"""Add a tile of the vocabulary to the sums of log-prob, entropy and gradient, in C (`add_tile` of kernels.c).

`Sums` of shared/model/head.py has the meaning of every sum, and about fifteen operations for a tile. Both products stay
with PyTorch. Models with a bias, a scale or a cap of the logits are left to `Sums`.
"""

import ctypes
from typing import Any

import torch

from shared.model.compiled.build import ADDRESS, INTEGER, NUMBER
from shared.model.head import Head, Sums, VocabularySums

LEAST = torch.finfo(torch.float32).min


class TileFields(ctypes.Structure):
    """`Tile` of kernels.c: the same order and types."""

    _fields_ = [
        *((name, ADDRESS) for name in ("product", "center", "targets")),
        *((name, ADDRESS) for name in ("largest", "total", "spread", "target", "fade", "shares")),
        *((name, INTEGER) for name in ("rows", "columns", "start")),
        ("temperature", NUMBER),
    ]


class CompiledSums:
    """The sums of n rows."""

    def __init__(
        self,
        library: Any,
        head: Head,
        hidden: torch.Tensor,
        targets: torch.Tensor,
        *,
        entropies: bool,
        directions: bool,
    ) -> None:
        self.library, self.head, self.has_entropies = library, head, entropies
        self.targets = targets.contiguous()
        self.sums = hidden.new_zeros((5, len(hidden)), dtype=torch.float32)
        self.largest, self.total, self.spread, self.target, self.fade = self.sums
        self.largest.fill_(LEAST)
        self.weighted = torch.zeros_like(hidden, dtype=torch.float32) if directions else None
        """[n, H]"""

    def add(self, product: torch.Tensor, columns: slice, center: torch.Tensor | None) -> None:
        product, weight = product.contiguous(), self.head.weight[columns]
        shares = None if self.weighted is None else torch.empty_like(product)
        tensors = {
            "product": product,
            "center": center,
            "targets": self.targets,
            "largest": self.largest,
            "total": self.total,
            "spread": self.spread,
            "target": self.target,
            "fade": self.fade,
            "shares": shares,
        }
        named = {name: None if tensor is None else tensor.data_ptr() for name, tensor in tensors.items()}
        rows, width = product.shape
        tile = TileFields(**named, rows=rows, columns=width, start=columns.start, temperature=self.head.temperature)
        self.library.add_tile(ctypes.addressof(tile), torch.get_num_threads())
        if self.weighted is not None and shares is not None:
            found = shares @ weight
            given = (part.data_ptr() for part in (self.weighted, found, self.fade))
            self.library.add_faded(*given, *found.shape, torch.get_num_threads())

    def entropies(self) -> torch.Tensor:
        return self.total.log() - self.spread / self.total if self.has_entropies else self.largest[:0]

    def mean(self) -> torch.Tensor:
        assert self.weighted is not None
        return self.weighted / self.total[:, None]


class CompiledSumsOf:
    """Makes sums that one library computes."""

    def __init__(self, library: Any) -> None:
        self.library = library
        library.add_tile.argtypes, library.add_tile.restype = [ADDRESS, INTEGER], None
        library.add_faded.argtypes, library.add_faded.restype = [*[ADDRESS] * 3, *[INTEGER] * 3], None

    def __call__(
        self, head: Head, hidden: torch.Tensor, targets: torch.Tensor, *, entropies: bool, directions: bool
    ) -> VocabularySums:
        if not head.form.is_plain:
            return Sums(head, hidden, targets, entropies=entropies, directions=directions)
        return CompiledSums(self.library, head, hidden, targets, entropies=entropies, directions=directions)
