"""C code between the products of an update: values and gradients are those of float64, for every kind of processor
that this one can play."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from shared.model.compiled.build import CannotCompile, opened
from shared.model.compiled.head import CompiledSumsOf
from shared.model.compiled.kernels import SOURCE, CompiledMath, refuse_difference
from shared.model.head import Head, LogitForm, Sums, token_stats
from shared.model.layers.layer_math import TORCH_MATH, LayerMath, TorchMath, signed
from shared.model.layers.sequences import Places
from shared.model.layers.trained_layers import TrainedLayers
from shared.model.policy import Kernels, Policy
from tests import reference
from tests.support.processor_kinds import BF16, FP32, KINDS, Kind, library_file, needs_compiler
from tests.unit.shared.test_trained_layers import (
    ALMOST_EMPTY,
    COUNTS,
    FAMILIES,
    LENGTHS,
    MIXED,
    OWNER,
    UNEVEN,
    gradients,
    policy_of,
    used,
)

pytestmark = [pytest.mark.usefixtures("one_thread"), needs_compiler]
kinds = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
EPS = 1e-6
LIMIT = {FP32: 2e-6, BF16: 2**-7}
"""Of the difference from float64, as a vector. In bf16 a value of the forward pass is rounded up to three times."""


@dataclass(frozen=True, kw_only=True)
class Functions:
    math: CompiledMath
    sums: CompiledSumsOf


made: dict[Kind, Functions] = {}


@pytest.fixture
def functions(kind: Kind, tmp_path: Path) -> Functions:
    """Compiled once for all tests of this process."""
    if kind not in made:
        library = opened(library_file(SOURCE, kind, tmp_path))
        made[kind] = Functions(math=CompiledMath(library, kind.dtype), sums=CompiledSumsOf(library))
    return made[kind]


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def drawn(kind: Kind, *shapes: Sequence[int]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(sum(map(sum, shapes)))
    return [torch.randn(tuple(shape), generator=generator).to(kind.dtype) for shape in shapes]


def doubled(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.double().requires_grad_() for tensor in tensors]


def is_near(found: torch.Tensor, exact: torch.Tensor, limit: float) -> bool:
    """As a vector, and in no value by more than four times that share of the largest one."""
    error = found.double() - exact
    return bool(error.norm() <= limit * exact.norm() and error.abs().max() <= 4 * limit * exact.abs().max())


shapes = pytest.mark.parametrize(("rows", "width"), [(1, 5), (7, 36), (3, 64), (300, 48), (564, 100)])


@kinds
@shapes
def test_rows_in_memory(functions: Functions, kind: Kind, rows: int, width: int) -> None:
    (x,) = drawn(kind, (rows, width))
    found = functions.math.row_major(x.t())
    assert found.is_contiguous() and torch.equal(found, x.t())
    assert functions.math.row_major(x) is x


@kinds
@shapes
def test_norms(functions: Functions, kind: Kind, rows: int, width: int) -> None:
    x, grad, added, weight = drawn(kind, (rows, width), (rows, width), (rows, width), (width,))
    exact_x, exact_weight = doubled(x, weight)
    y = reference.rms_norm(exact_x, exact_weight, EPS)
    (x_grad,) = torch.autograd.grad(y, exact_x, grad.double())
    math, limit = functions.math, LIMIT[kind.dtype]
    assert is_near(math.norm(x, weight, EPS), y, limit)
    assert is_near(math.norm_gradient(x, weight, EPS, grad), x_grad, limit)
    assert is_near(math.norm_gradient(x, weight, EPS, grad, added), x_grad + added.double(), limit)


@kinds
@shapes
def test_the_product_of_the_gate(functions: Functions, kind: Kind, rows: int, width: int) -> None:
    gate, up, grad = drawn(kind, (rows, width), (rows, width), (rows, width))
    gate[0, 0], gate[0, 1] = 200.0, -200.0
    exact = doubled(gate, up)
    product = reference.gated(*exact)
    grads = torch.autograd.grad(product, exact, grad.double())
    assert is_near(functions.math.gated(gate, up), product, LIMIT[kind.dtype])
    found = functions.math.gated_gradients(gate, up, grad.clone())
    for one, true in zip(found, (product, *grads), strict=True):
        assert is_near(one, true, LIMIT[kind.dtype])


@kinds
@pytest.mark.parametrize("counts", [COUNTS, UNEVEN, ALMOST_EMPTY])
@pytest.mark.parametrize("size", [6, 32, 80])
def test_heads(functions: Functions, kind: Kind, counts: Sequence[int], size: int) -> None:
    places = Places.of(LENGTHS, counts, OWNER)
    n = sum(LENGTHS) + sum(counts)
    query, key, value = drawn(kind, (n, 4, size), (n, 2, size), (n, 2, size))
    angles = torch.rand(n, 1, size // 2, dtype=torch.float64)
    cos, sin = (torch.cat([half, half], dim=-1).to(kind.dtype) for half in (angles.cos(), angles.sin()))
    rotation = cos, signed(sin)
    exact = doubled(query, key, value)
    half_cos, half_sin = (table.double()[..., : size // 2] for table in (cos, sin))
    turned = [reference.rotated(part, half_cos, half_sin) for part in exact[:2]]
    whole: list[torch.Tensor] = []
    padded = [places.padded(part) for part in (*turned, exact[2])]
    for number in range(len(places.buckets)):
        owner = places.owners[number - 1] if number else None
        before = [None if owner is None else part[0][owner] for part in padded[1:]]
        whole.append(padded[0][number])
        whole += [
            part[number] if first is None else torch.cat([first, part[number]], dim=2)
            for part, first in zip(padded[1:], before, strict=True)
        ]
    found = functions.math.heads(query, key, value, rotation, places)
    arriving = drawn(kind, *(part.shape for part in found))
    grads = torch.autograd.grad(whole, exact, [part.double() for part in arriving])
    for one, true in zip(found, whole, strict=True):
        assert one.shape == true.shape and is_near(one, true, LIMIT[kind.dtype])
    found = functions.math.heads_gradients(arriving, rotation, places)
    # Gradients of a prompt's keys are summed in the type of the policy, one completion after the other.
    for one, true in zip(found, grads, strict=True):
        assert one.shape == true.shape and is_near(one, true, 2 * LIMIT[kind.dtype])


@kinds
@pytest.mark.parametrize(("queries", "columns"), [(1, 1), (3, 7), (5, 64), (63, 123)])
def test_attention(functions: Functions, kind: Kind, queries: int, columns: int) -> None:
    generator = torch.Generator().manual_seed(columns)
    scores = 4 * torch.randn(2, 3, queries, columns, generator=generator)
    mask = torch.rand(2, 1, queries, columns, generator=generator) < 0.6
    mask[..., 0] = True
    exact = scores.double().requires_grad_()
    expected = reference.attention_weights(exact, mask, 0.3)
    weights = functions.math.attention_weights(scores.clone(), 0.3, mask, kind.dtype)
    assert weights.dtype == kind.dtype and is_near(weights, expected, LIMIT[kind.dtype])
    assert not weights[~mask.expand_as(weights)].any()
    (grad,) = drawn(kind, weights.shape)
    # The gradient of the weights that there are.
    weighted = weights.double() * (grad.double() - (weights.double() * grad.double()).sum(-1, keepdim=True)) * 0.3
    assert is_near(functions.math.score_gradients(weights, grad.clone(), 0.3), weighted, LIMIT[kind.dtype])
    if kind.dtype == FP32:
        (true,) = torch.autograd.grad(expected, exact, grad.double())
        assert (weighted - true).abs().max() <= 1e-5 * true.abs().max() + 1e-12


@kinds
@pytest.mark.parametrize("rank", [1, 16, 17, 48])
@pytest.mark.parametrize("rows", [1, 31, 32, 33, 564])
@pytest.mark.parametrize("width", [50, 96, 300])
def test_gradients_of_adapters(functions: Functions, kind: Kind, rows: int, rank: int, width: int) -> None:
    low, x = drawn(kind, (rows, rank), (rows, width))
    for a, b in ((low, x), (x, low)):
        exact = 0.5 * a.double().t() @ b.double()
        found = functions.math.transposed_product(a, b, 0.5)
        assert found.dtype == FP32 and found.shape == exact.shape
        assert (found - exact).abs().max() <= 1e-5 * exact.abs().max()


@kinds
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("vocabulary", [11, 5000])
def test_log_probs_entropies_and_gradient(
    functions: Functions, kind: Kind, temperature: float, vocabulary: int
) -> None:
    hidden, weight = drawn(kind, (23, 40), (vocabulary, 40))
    targets = torch.randint(vocabulary, (23,), generator=torch.Generator().manual_seed(1))
    targets[:3] = torch.tensor([0, min(2047, vocabulary - 1), vocabulary - 1])
    hidden.requires_grad_()
    exact = hidden.detach().double().requires_grad_()
    logprobs, entropies = reference.softmax_stats(exact @ weight.double().t(), targets, temperature)
    (true,) = torch.autograd.grad(logprobs.sum(), exact)
    found = token_stats(hidden, weight, targets, temperature=temperature, rows=7, sums=functions.sums)
    (gradient,) = torch.autograd.grad(found.logprobs.sum(), hidden)
    limit = 1e-5 if kind.dtype == FP32 else 2**-6
    assert is_near(found.logprobs, logprobs, limit) and is_near(found.entropies, entropies, limit)
    assert is_near(gradient, true, limit)
    plain = token_stats(hidden, weight, targets, temperature=temperature, rows=7, sums=Sums)
    torch.testing.assert_close(found.logprobs, plain.logprobs, rtol=1e-5, atol=1e-5)


@kinds
def test_what_is_not_a_number_stays_so(functions: Functions, kind: Kind) -> None:
    hidden, weight = drawn(kind, (3, 40), (90, 40))
    hidden[1, 4] = float("nan")
    found = token_stats(hidden, weight, torch.arange(3), temperature=1.0, rows=3, sums=functions.sums)
    assert found.logprobs.isnan().tolist() == found.entropies.isnan().tolist() == [False, True, False]
    x, weights = hidden.clone(), torch.ones(40, dtype=kind.dtype)
    results = [
        functions.math.norm(x, weights, EPS),
        functions.math.gated(x, x),
        functions.math.attention_weights(x.float()[None, None], 1.0, torch.ones(1, 1, 3, 40).bool(), kind.dtype)[0, 0],
    ]
    for result in results:
        assert result.isnan().any(dim=1).tolist() == [False, True, False]


@kinds
def test_logits_of_other_forms_are_left_to_pytorch(functions: Functions, kind: Kind) -> None:
    hidden, weight = drawn(kind, (5, 40), (90, 40))
    for form in (LogitForm(scale=0.5), LogitForm(cap=3.0), LogitForm(bias=torch.ones(90))):
        mine, theirs = (
            token_stats(hidden, weight, torch.arange(5), temperature=1.0, rows=5, form=form, sums=sums).logprobs
            for sums in (functions.sums, Sums)
        )
        assert torch.equal(mine, theirs)


def every_result(functions: Functions, kind: Kind, of: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
    """of: gives a matrix another order in memory, or not."""
    math = functions.math
    x, grad, added, weight, low = drawn(kind, (400, 96), (400, 96), (400, 96), (96,), (400, 5))
    mask = torch.ones(1, 1, 400, 96, dtype=torch.bool)
    places = Places.of((60, 40), (60, 60, 60), (0, 1, 1))
    query, key, value = drawn(kind, (280, 4, 32), (280, 2, 32), (280, 2, 32))
    cos, sin = drawn(kind, (280, 1, 32), (280, 1, 32))
    padded = math.heads(query, key, value, (cos, sin), places)
    hidden, head = drawn(kind, (60, 96), (3000, 96))
    tile = Head(weight=head, form=LogitForm(), temperature=0.7)
    sums: Any = functions.sums(tile, hidden, torch.arange(60), entropies=True, directions=True)
    (product,) = drawn(kind, (60, 3000))
    sums.add(product, slice(0, 3000), product[:, :1])
    return [
        sums.sums,
        *padded,
        *math.heads_gradients(padded, (cos, sin), places),
        math.row_major(of(x)),
        math.norm(of(x), weight, EPS),
        math.norm_gradient(of(x), weight, EPS, of(grad), of(added)),
        math.gated(of(x), of(grad)),
        *math.gated_gradients(of(x), of(grad), of(added).clone()),
        math.attention_weights(of(x.float())[None, None], 0.3, mask, kind.dtype),
        math.score_gradients(of(x), of(grad).clone(), 0.3),
        math.transposed_product(of(low), of(x)),
    ]


@kinds
def test_the_bits_depend_on_neither_threads_nor_order_in_memory(functions: Functions, kind: Kind) -> None:
    expected = every_result(functions, kind, lambda x: x)
    with threads(3):
        shared = every_result(functions, kind, lambda x: x)
    turned = every_result(functions, kind, lambda x: x.t().contiguous().t())
    # The last one is PyTorch's where there are no tiles.
    ours = slice(None if functions.math.has_tiles else -1)
    for one, other, third in zip(expected[ours], shared[ours], turned[ours], strict=True):
        assert torch.equal(one, other) and torch.equal(one, third)


@kinds
@pytest.mark.parametrize("counts", [COUNTS, UNEVEN, MIXED, ALMOST_EMPTY])
@pytest.mark.parametrize("family", FAMILIES)
def test_layers_have_the_values_and_gradients_of_pytorch(
    functions: Functions, kind: Kind, tmp_path: Path, family: str, counts: Sequence[int]
) -> None:
    plain = policy_of(tmp_path, family, kind.dtype)
    policy = plain.with_kernels(Kernels(math=functions.math, sums=functions.sums))
    with torch.no_grad():
        ours, theirs = used(policy, counts), used(plain, counts)
    if kind.dtype == BF16:
        assert ours.ne(theirs).float().mean() <= 0.02, "a sum in another order hardly ever rounds the other way"
    assert is_near(ours, theirs.double(), LIMIT[kind.dtype])
    limit = 2e-5 if kind.dtype == FP32 else 2**-5
    for mine, other in zip(gradients(policy, counts), gradients(plain, counts), strict=True):
        assert (mine - other).norm() <= limit * other.norm()


@kinds
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_in_bf16_are_as_close_to_exact_ones_as_those_of_pytorch(
    functions: Functions, kind: Kind, tmp_path: Path, family: str
) -> None:
    exact = gradients(policy_of(tmp_path, family, FP32))
    plain = policy_of(tmp_path, family, kind.dtype)

    def error(of: Policy) -> float:
        found = [(mine - true).norm() / true.norm() for mine, true in zip(gradients(of), exact, strict=True)]
        return float(torch.stack(found).mean())

    assert error(plain.with_kernels(Kernels(math=functions.math))) <= max(1.1 * error(plain), 1e-5)


def test_layers_that_are_computed_again_stay_so(tmp_path: Path) -> None:
    policy = policy_of(tmp_path, "qwen2", FP32)
    policy.recompute_activations()
    assert isinstance(policy.layers, TrainedLayers)
    assert policy.layers.with_math(TORCH_MATH).recomputes


class Wrong(TorchMath):
    """One function computes something else."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name != super().__getattribute__("name"):
            return found

        def wrong(*args: Any, **kwargs: Any) -> Any:
            result = found(*args, **kwargs)
            return 1.1 * result if isinstance(result, torch.Tensor) else [1.1 * part for part in result]

        return wrong


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("row_major", "order of a matrix"),
        ("norm", "norm"),
        ("norm_gradient", "gradient of a norm"),
        ("gated", "product of the gate"),
        ("gated_gradients", "gradient of the gate"),
        ("heads", "heads"),
        ("heads_gradients", "gradient of heads"),
        ("attention_weights", "weights of attention"),
        ("score_gradients", "gradient of scores"),
        ("transposed_product", "gradient of A"),
    ],
)
def test_a_library_that_computes_something_else_is_refused(name: str, said: str) -> None:
    refuse_difference(TORCH_MATH, Sums, BF16)
    math: LayerMath = Wrong(name)
    with pytest.raises(CannotCompile, match=f"its {said} differs from PyTorch's by"):
        refuse_difference(math, Sums, BF16)
    with pytest.raises(CannotCompile, match="its log-probs differs"):
        refuse_difference(TORCH_MATH, WrongSums, BF16)


class WrongSums(Sums):
    def add(self, product: torch.Tensor, columns: slice, center: torch.Tensor | None) -> None:
        super().add(1.1 * product, columns, center)
