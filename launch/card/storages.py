"""Counts the memory that code takes on a card, by running it over tensors without values (shared/base/meta.py).

    peak of a phase   the largest sum of all storages that are alive at once, each rounded up to 512 bytes
    item of a storage the name it was given; else "activations" if a later phase still needs it, else "temporaries"
    reserved          what PyTorch's allocator holds at that time (launch/card/allocator.py)

A storage is what tensors are views of; it is alive while one of them is. PyTorch calls `__torch_dispatch__` for every
operation, so each new storage is seen once, and a weak reference tells when it is gone. What happened is kept as a
list of events, and all questions are answered from that list afterwards.

PyTorch works out shapes in Python, which would take most of the time. An operation in place makes no storage, so it is
left out. An operation whose results share no storage with its arguments is worked out once; with the same arguments it
gives empty tensors of the same shapes from then on, because the layers of a model are alike.
What an operation allocates for itself and frees before it returns is not seen; `inside` says how much it is.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, count
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from launch.card.allocator import Allocator, rounded
from launch.card.items import ACTIVATIONS, TEMPORARIES, Peak
from launch.plan.memory import Items

CHANGE_SHAPE = frozenset({"detach_", "resize_", "set_", "squeeze_", "t_", "transpose_", "unsqueeze_"})
"""Operations in place that do more than write."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """A storage that began or ended."""

    key: int
    """Which one."""
    change: int
    """Bytes, negative at the end."""


RELEASE = Event(key=-1, change=0)
"""Caches are released."""


@dataclass(frozen=True, kw_only=True)
class Span:
    """The events of a phase."""

    name: str
    start: int
    """Of its first event."""
    end: int
    """Of the first one after it."""
    temporaries: str
    """What its nameless storages are called that do not outlive it."""


Shape = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""Size, strides and type of a tensor without values."""


def shape_of(tensor: torch.Tensor) -> Shape:
    return tensor.shape, tensor.stride(), tensor.dtype


def empty(shape: Shape) -> torch.Tensor:
    size, stride, dtype = shape
    return torch.empty_strided(size, stride, dtype=dtype, device="meta")


def described(argument: Any) -> Any:
    """What the shape of a result depends on, as the key of a table."""
    if isinstance(argument, torch.Tensor):
        return shape_of(argument) if argument.is_meta else id(argument)
    return tuple(map(described, argument)) if isinstance(argument, list | tuple) else (type(argument), argument)


def tensors_in(argument: Any) -> Iterator[torch.Tensor]:
    if isinstance(argument, torch.Tensor):
        yield argument
    elif isinstance(argument, list | tuple):
        for part in argument:
            yield from tensors_in(part)


def are_new(found: Any, given: Sequence[Any]) -> bool:
    """Whether these are tensors without values, none of them a view of what was given."""
    results = list(tensors_in(found))
    if not results or len(results) != (1 if isinstance(found, torch.Tensor) else len(found)):
        return False
    old = {tensor.untyped_storage()._cdata for tensor in tensors_in(given)}
    return all(tensor.is_meta and tensor.untyped_storage()._cdata not in old for tensor in results)


def nothing(func: Any, args: Sequence[Any]) -> int:
    return 0


def is_in_place(func: Any) -> bool:
    """Whether it only writes into its first argument."""
    name = func._opname
    return name.endswith("_") and name not in CHANGE_SHAPE


def is_meta(argument: Any) -> bool:
    """A tensor, or a list of them."""
    first = argument[0] if isinstance(argument, list | tuple) else argument
    return isinstance(first, torch.Tensor) and first.is_meta


class Storages(TorchDispatchMode):
    """While it is active, every storage on the meta device is noted."""

    def __init__(self, inside: Callable[[Any, Sequence[Any]], int] = nothing) -> None:
        """inside: bytes that an operation with these arguments takes for itself and gives back."""
        super().__init__()
        self.inside = inside
        self.events: list[Event] = []
        self.spans: list[Span] = []
        self.names: dict[int, str] = {}
        """By storage, where one was given."""
        self.alive: dict[int, tuple[int, Any]] = {}
        """By address: the storage's key, and a reference that notices its end."""
        self.keys = count()
        self.results: dict[Any, tuple[list[Shape], bool]] = {}
        """By operation and arguments: the shapes, and whether it is one tensor rather than several."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if is_in_place(func) and is_meta(args[0]):
            return args[0] if func._schema.returns else None
        found = self.run(func, args, kwargs or {})
        for tensor in found if isinstance(found, tuple | list) else (found,):
            if isinstance(tensor, torch.Tensor) and tensor.is_meta:
                self.note(tensor.untyped_storage())
        if size := rounded(self.inside(func, args)):
            key = next(self.keys)
            self.events += (Event(key=key, change=size), Event(key=key, change=-size))
        return found

    def run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        given = (*args, *kwargs.values())
        key = func, tuple(kwargs), described(given)
        if known := self.results.get(key):
            shapes, is_one = known
            return empty(shapes[0]) if is_one else tuple(map(empty, shapes))
        found = func(*args, **kwargs)
        if are_new(found, given):
            self.results[key] = [shape_of(tensor) for tensor in tensors_in(found)], isinstance(found, torch.Tensor)
        return found

    def note(self, storage: torch.UntypedStorage) -> None:
        """Unless it is known, or empty."""
        address, size = storage._cdata, rounded(storage.nbytes())
        if address in self.alive or not size:
            return
        key = next(self.keys)

        def gone(_: object) -> None:
            del self.alive[address]
            self.events.append(Event(key=key, change=-size))

        self.alive[address] = key, weakref.ref(storage, gone)
        self.events.append(Event(key=key, change=size))

    def name(self, item: str, tensors: Iterable[torch.Tensor]) -> None:
        """What these are for; one that was made outside begins now. A name that was given before stays."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self.note(storage)
            if known := self.alive.get(storage._cdata):
                self.names.setdefault(known[0], item)

    @contextmanager
    def phase(self, name: str, temporaries: str = TEMPORARIES) -> Iterator[None]:
        start = len(self.events)
        yield
        self.spans.append(Span(name=name, start=start, end=len(self.events), temporaries=temporaries))

    def release(self) -> None:
        """The end of a turn: what the allocator has cached goes back to the driver."""
        self.events.append(RELEASE)

    def peaks(self) -> list[Peak]:
        """Of every phase."""
        totals = [0, *accumulate(event.change for event in self.events)]
        places = [max(range(span.start, span.end + 1), key=totals.__getitem__) for span in self.spans]
        ends = {event.key: place for place, event in enumerate(self.events) if event.change < 0}
        alive = self.alive_at({*places})
        reserved = [0, *self.reserved_after_each()]
        return [
            Peak(name=span.name, items=self.items(span, alive[place], ends), reserved=reserved[span.end])
            for span, place in zip(self.spans, places, strict=True)
        ]

    def alive_at(self, places: Set[int]) -> dict[int, dict[int, int]]:
        """Place -> the storages that are alive before the event there, with their bytes."""
        found: dict[int, dict[int, int]] = {}
        alive: dict[int, int] = {}
        for place, event in enumerate([*self.events, RELEASE]):
            if place in places:
                found[place] = dict(alive)
            if event.change > 0:
                alive[event.key] = event.change
            else:
                alive.pop(event.key, None)
        return found

    def reserved_after_each(self) -> Iterator[int]:
        allocator = Allocator()
        for event in self.events:
            if event is RELEASE:
                allocator.release()
            elif event.change > 0:
                allocator.take(event.key, event.change)
            else:
                allocator.give_back(event.key)
            yield allocator.reserved

    def items(self, span: Span, alive: Mapping[int, int], ends: Mapping[int, int]) -> Items:
        found: Items = {}
        for key, size in alive.items():
            lasts = ends.get(key, len(self.events)) >= span.end
            name = self.names.get(key) or (ACTIVATIONS if lasts else span.temporaries)
            found[name] = found.get(name, 0) + size
        return found
