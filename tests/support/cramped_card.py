"""A card that is too small, without a card: what every operation allocates is seen, and some of it is refused."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Kind = Callable[[Any, tuple[Any, ...]], bool]
"""Whether an operation with these arguments is meant."""
GRAIN = 512
"""Bytes; a card's allocator gives nothing smaller."""


def named(*names: str) -> Kind:
    """Operations of these names, such as `silu` or `_foreach_sqrt`."""
    return lambda func, args: func._schema.name.removeprefix("aten::") in names


def product_of_width(width: int) -> Kind:
    """Matrix products whose result has so many columns."""
    return lambda func, args: named("mm", "bmm", "addmm")(func, args) and args[-1].shape[-1] == width


class Refusing(TorchDispatchMode):
    """Memory runs out at the `at`-th operation of a kind, and again after each of the first `times` failures."""

    def __init__(self, kind: Kind, at: int = 1, times: int = 1) -> None:
        super().__init__()
        self.kind = kind
        self.at = at
        self.left = times
        self.seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.left and self.kind(func, args):
            self.seen += 1
            if self.seen == self.at:
                self.seen, self.left = 0, self.left - 1
                raise torch.OutOfMemoryError(f"this test's card has no memory for {func}")
        return func(*args, **(kwargs or {}))


class Allocations(TorchDispatchMode):
    """Every storage that an operation makes: how large, how many bytes are in use, and how many were at most."""

    def __init__(self, room: int | None = None, device: str = "cpu") -> None:
        """room: bytes of the card; what does not fit is refused."""
        super().__init__()
        self.room = room
        self.device = device
        self.sizes: list[int] = []
        self.now = self.peak = 0
        self.known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tree_leaves((args, kwargs)):
            self.look_at(tensor, made=False)
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            self.look_at(tensor, made=True)
        return result

    def look_at(self, tensor: Any, *, made: bool) -> None:
        """What was there before the block is known, and does not count."""
        if not isinstance(tensor, torch.Tensor) or tensor.device.type != self.device:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if (known := self.known.get(key)) and known() is storage:
            return
        self.known[key] = weakref.ref(storage)
        if made:
            self.add(storage)

    def add(self, storage: Any) -> None:
        count = -(-storage.nbytes() // GRAIN) * GRAIN
        if self.room is not None and self.now + count > self.room:
            raise torch.OutOfMemoryError(f"{count} bytes, {self.room - self.now} are free on this test's card")
        self.sizes.append(count)
        self.now += count
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self.drop, count)

    def drop(self, count: int) -> None:
        self.now -= count
