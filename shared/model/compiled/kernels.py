"""What layers compute between their products, in C (kernels.c).

PyTorch takes two to nine operations for each function, and each operation goes over memory. A function here does that
once; what it reads again is in the cache. In bf16 with half a billion parameters, an update then takes three quarters
of the time (benchmarks/update_bound.py).

Functions read matrices row after row, so what lies column by column, as products of few rows give it, is copied first.
They are compared with PyTorch's operations each time a library is opened, because a compiler may have faults.
"""

import ctypes
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shared.model.compiled.build import ADDRESS, INTEGER, NUMBER, CannotCompile, Source, built, opened
from shared.model.compiled.head import CompiledSumsOf
from shared.model.head import Sums, SumsOf, token_stats
from shared.model.layers.layer_math import TORCH_MATH, LayerMath, Rotation, Three, of_all_prompts
from shared.model.layers.sequences import Bucket, Places

SOURCE = Source(name="kernels", main=Path(__file__).with_name("kernels.c"))
ARGUMENTS = {
    "row_major": [*[ADDRESS] * 2, *[INTEGER] * 3],
    "norm": [*[ADDRESS] * 3, INTEGER, INTEGER, NUMBER, INTEGER],
    "norm_gradient": [*[ADDRESS] * 5, INTEGER, INTEGER, NUMBER, INTEGER],
    "gated": [*[ADDRESS] * 3, INTEGER, INTEGER],
    "gated_gradients": [*[ADDRESS] * 5, INTEGER, INTEGER],
    "to_heads": [*[ADDRESS] * 3, INTEGER],
    "from_heads": [*[ADDRESS] * 3, INTEGER],
    "attention_weights": [*[ADDRESS] * 3, *[INTEGER] * 4, NUMBER, INTEGER],
    "score_gradients": [*[ADDRESS] * 2, INTEGER, INTEGER, NUMBER, INTEGER],
}
"""As in kernels.c."""
THIN = "transposed_product"
"""In bf16 with AMX only."""
TILE_RANKS, TILE_ROWS = 16, 32
"""Of the left factor in a tile."""

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-6}
"""Of a result as a vector, relative. C code rounds less between the operations of a gradient."""

log = logging.getLogger("kernels")


class HeadsFields(ctypes.Structure):
    """`Heads` of kernels.c: the same order and types."""

    _fields_ = [
        *((name, ADDRESS) for name in ("cos", "sin", "places")),
        *((name, INTEGER) for name in ("rows", "heads", "size", "length", "before", "columns")),
    ]


class CompiledMath:
    """On a CPU, of one type."""

    def __init__(self, library: Any, dtype: torch.dtype) -> None:
        """dtype: that the library was compiled for."""
        self.library, self.dtype = library, dtype
        for function, arguments in ARGUMENTS.items():
            getattr(library, function).argtypes, getattr(library, function).restype = arguments, None
        self.has_tiles = hasattr(library, THIN)
        """Of AMX."""
        if self.has_tiles:
            library.transposed_product.argtypes = [*[ADDRESS] * 4, *[INTEGER] * 5, NUMBER, INTEGER]
            library.transposed_product.restype = None

    def row_major(self, x: torch.Tensor) -> torch.Tensor:
        if x.is_contiguous() or not x.t().is_contiguous():
            return x.contiguous()
        found = torch.empty_like(x, memory_format=torch.contiguous_format)
        self.library.row_major(*addresses(x, found), *x.shape, torch.get_num_threads())
        return found

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        # Every layer begins with this one: values of another type would be read and written beyond their end.
        assert x.dtype == weight.dtype == self.dtype, f"{x.dtype}, {weight.dtype}"
        x = x.contiguous()
        y = torch.empty_like(x)
        self.library.norm(*addresses(x, weight, y), *rows_of(x), eps, torch.get_num_threads())
        return y

    def norm_gradient(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, grad: torch.Tensor, added: torch.Tensor | None = None
    ) -> torch.Tensor:
        x, grad, added = x.contiguous(), grad.contiguous(), None if added is None else added.contiguous()
        found = torch.empty_like(x)
        given = addresses(x, weight, grad, added, found)
        self.library.norm_gradient(*given, *rows_of(x), eps, torch.get_num_threads())
        return found

    def gated(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        product = torch.empty_like(gate)
        self.library.gated(*addresses(gate, up, product), gate.numel(), torch.get_num_threads())
        return product

    def gated_gradients(self, gate: torch.Tensor, up: torch.Tensor, grad: torch.Tensor) -> Three:
        gate, up, product = gate.contiguous(), up.contiguous(), grad.contiguous()
        of_gate, of_up = torch.empty_like(gate), torch.empty_like(up)
        where = addresses(gate, up, product, of_gate, of_up)
        self.library.gated_gradients(*where, gate.numel(), torch.get_num_threads())
        return product, of_gate, of_up

    def heads(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rotation: Rotation, places: Places
    ) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        for number, (bucket, rows) in enumerate(parts_of(places)):
            turn = turn_of(rotation, rows)
            of_prompts = [part[places.owners[number - 1]] for part in found[1:3]] if number else [None, None]
            found += [
                self.padded(bucket, query[rows], turn, None),
                self.padded(bucket, key[rows], turn, of_prompts[0]),
                self.padded(bucket, value[rows], None, of_prompts[1]),
            ]
        return found

    def padded(
        self, bucket: Bucket, rows: torch.Tensor, rotation: Rotation | None, before: torch.Tensor | None
    ) -> torch.Tensor:
        """[row_count, heads, D], [sequences, heads, Lp, D] -> [sequences, heads, Lp + length, D]"""
        (count, length), (_, heads, size) = bucket.shape, rows.shape
        first = 0 if before is None else before.shape[2]
        shape = count, heads, first + length, size
        padded = rows.new_empty(shape) if bucket.kept is None else rows.new_zeros(shape)
        if before is not None:
            padded[:, :, :first] = before
        fields = fields_of(bucket, rows, rotation, first)
        self.library.to_heads(ctypes.addressof(fields), *addresses(rows, padded), torch.get_num_threads())
        return padded

    def heads_gradients(self, grads: Sequence[torch.Tensor], rotation: Rotation, places: Places) -> Three:
        width = places.prompts.shape[1]
        of_prompts = grads[0], *(of_all_prompts(grads[first::3], places) for first in (1, 2))
        count = sum(bucket.row_count for bucket in places.buckets)
        found = tuple(grad.new_empty((count, grad.shape[1], grad.shape[3])) for grad in of_prompts)
        for number, (bucket, rows) in enumerate(parts_of(places)):
            turn = turn_of(rotation, rows)
            arrived = grads[3 * number : 3 * number + 3] if number else of_prompts
            for result, grad, turned, first in zip(found, arrived, (turn, turn, None), (0, width, width), strict=True):
                grad, out = grad.contiguous(), result[rows]
                fields = fields_of(bucket, out, turned, first if number else 0)
                self.library.from_heads(ctypes.addressof(fields), *addresses(grad, out), torch.get_num_threads())
        return found  # pyright: ignore[reportReturnType]

    def attention_weights(
        self, scores: torch.Tensor, scaling: float, mask: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        scores, mask = scores.contiguous(), mask.contiguous()
        weights = torch.empty_like(scores, dtype=dtype)
        given = addresses(scores, mask, weights)
        self.library.attention_weights(*given, *scores.shape, scaling, torch.get_num_threads())
        return weights

    def score_gradients(self, weights: torch.Tensor, grad: torch.Tensor, scaling: float) -> torch.Tensor:
        weights, grad = weights.contiguous(), grad.contiguous()
        given = addresses(weights, grad)
        self.library.score_gradients(*given, *rows_of(grad), scaling, torch.get_num_threads())
        return grad

    def transposed_product(self, a: torch.Tensor, b: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        if not self.has_tiles:
            return TORCH_MATH.transposed_product(a, b, scale)
        found = a.new_empty((a.shape[1], b.shape[1]), dtype=torch.float32)
        thin, wide, apart = a.contiguous(), b.contiguous(), found.stride()
        if a.shape[1] > b.shape[1]:
            thin, wide, apart = wide, thin, apart[::-1]
        (rows, rank), width = thin.shape, wide.shape[1]
        tiles = thin.new_empty(-(-rank // TILE_RANKS) * -(-rows // TILE_ROWS), TILE_RANKS * TILE_ROWS)
        where = addresses(thin, wide, found, tiles)
        self.library.transposed_product(*where, rows, rank, width, *apart, scale, torch.get_num_threads())
        return found


def addresses(*tensors: torch.Tensor | None) -> list[int | None]:
    return [None if tensor is None else tensor.data_ptr() for tensor in tensors]


def rows_of(x: torch.Tensor) -> tuple[int, int]:
    """How many, and their width."""
    return x.numel() // x.shape[-1], x.shape[-1]


def turn_of(rotation: Rotation, rows: slice) -> Rotation:
    return rotation[0][rows].contiguous(), rotation[1][rows].contiguous()


def parts_of(places: Places) -> Iterator[tuple[Bucket, slice]]:
    """Each bucket and its rows."""
    start = 0
    for bucket in places.buckets:
        yield bucket, slice(start, start + bucket.row_count)
        start += bucket.row_count


def fields_of(bucket: Bucket, rows: torch.Tensor, rotation: Rotation | None, before: int) -> HeadsFields:
    """rows: [row_count, heads, D]. before: columns that come first."""
    cos, sin = rotation or (None, None)
    count, heads, size = rows.shape
    length = bucket.shape[1]
    where = addresses(cos, sin, bucket.kept)
    return HeadsFields(*where, count, heads, size, length, before, before + length)


def refuse_difference(math: LayerMath, sums: SumsOf, dtype: torch.dtype) -> None:
    """CannotCompile if a result is not what PyTorch's operations give."""
    results = examples(math, dtype) | examples_of_head(sums, dtype)
    for name, expected in (examples(TORCH_MATH, dtype) | examples_of_head(Sums, dtype)).items():
        found = results[name]
        gap = float((found.double() - expected.double()).norm() / expected.double().norm())
        if not gap <= TOLERANCE[dtype]:
            raise CannotCompile(f"its {name} differs from PyTorch's by {gap:.2g}, at most {TOLERANCE[dtype]:.2g}")


def examples(math: LayerMath, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Results of every function, the same inputs in each call, large enough that several threads compute."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    places = Places.of((60, 30), (90, 60), (0, 1))
    count, heads, size = 240, 2, 36
    x, grad, added, weight = drawn(count, size), drawn(count, size), drawn(count, size), drawn(size)
    rotation = drawn(count, 1, size), drawn(count, 1, size)
    named = {
        "order of a matrix": [math.row_major(x.t())],
        "norm": [math.norm(x, weight, 1e-6)],
        "gradient of a norm": [math.norm_gradient(x, weight, 1e-6, grad, added)],
        "product of the gate": [math.gated(x, grad)],
        "gradient of the gate": [*math.gated_gradients(x, grad, added.clone())],
    }
    rows = drawn(count, heads, size), drawn(count, heads, size), drawn(count, heads, size)
    named["heads"] = padded = math.heads(*rows, rotation, places)
    named["gradient of heads"] = [*math.heads_gradients([drawn(*one.shape) for one in padded], rotation, places)]
    mask = torch.ones(2, 1, 60, 75, dtype=torch.bool).tril(15)
    scores = torch.randn((2, heads, 60, 75), generator=generator)
    weights = math.attention_weights(scores, 0.3, mask, dtype)
    named["weights of attention"] = [weights]
    named["gradient of scores"] = [math.score_gradients(weights, drawn(*weights.shape), 0.3)]
    low = drawn(count, 17)
    named["gradient of A"] = [math.transposed_product(low, x)]
    named["gradient of B"] = [math.transposed_product(x, low, 0.5)]
    return {name: torch.cat([part.flatten() for part in parts]) for name, parts in named.items()}


def examples_of_head(sums: SumsOf, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(shape, generator=generator).to(dtype) for shape in ((5, 36), (2100, 36)))
    hidden.requires_grad_()
    with torch.enable_grad():
        targets = torch.tensor([0, 2047, 2048, 2099, 7])
        found = token_stats(hidden, weight, targets, temperature=0.8, rows=5, sums=sums)
        (gradient,) = torch.autograd.grad(found.logprobs.sum(), hidden)
    return {"log-probs": found.logprobs.detach(), "entropies": found.entropies, "gradient of log-probs": gradient}


@dataclass(frozen=True, kw_only=True)
class CompiledKernels:
    """Of one library."""

    name: str
    """Of its file."""
    math: CompiledMath
    sums: CompiledSumsOf


def load_kernels(dtype: torch.dtype, cache: Path) -> CompiledKernels | None:
    """None if they cannot be built here; the log says why."""
    try:
        file = built(SOURCE, dtype, cache)
        library = opened(file)
        math, sums = CompiledMath(library, dtype), CompiledSumsOf(library)
        refuse_difference(math, sums, dtype)
    # A damaged file may lack a function.
    except (CannotCompile, OSError, AttributeError) as error:
        log.warning("PyTorch computes what an update needs between its products, because %s", error)
        return None
    return CompiledKernels(name=file.stem, math=math, sums=sums)
