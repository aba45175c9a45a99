"""Weights for few rows: the same bits in each kind of product, and copies only as far as they help and are allowed."""

import itertools
from pathlib import Path

import pytest
import torch

from actor.engines.hf_engine import HFEngine
from actor.engines.token_step.coded import CodedWeight
from actor.engines.token_step.packed import (
    COMPARED_VALUES,
    FEW,
    MEASURED_BYTES,
    ROWS,
    AddedProduct,
    FasterKinds,
    Packing,
    RowProduct,
    faster_kinds,
    made_up_rows,
    made_up_weight,
    use_bf16_units,
    weights_to_measure,
)
from actor.engines.token_step.stacks import ALL_ROWS, Stack
from protocol.messages import Sampling
from shared.config.processes import CODED_ROWS, PACKED_TOKENS, ActorConfig
from shared.model.layers.lora import DenseMatmul, FrozenLinear, LoraLinear
from shared.model.layers.products import weight_product
from shared.model.layers.trained_layers import Norm
from tests.support.fakes import tiny_prompter, unheard
from tests.unit.actor.test_layers import ADAPTED, OURS, groups, policy_of

pytestmark = pytest.mark.usefixtures("one_thread")

SUPPORTED = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
needs_bf16 = pytest.mark.skipif(not SUPPORTED, reason="this processor has no bf16 products in oneDNN")


def weight_of(out: int, size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(out, size, generator=torch.Generator().manual_seed(out)).to(dtype)


@needs_bf16
@pytest.mark.parametrize("rows", [1, 3, 8, 16, 40, 130])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_packed_product_has_the_bits_of_the_plain_one(rows: int, has_bias: bool) -> None:
    weight, x = weight_of(320, 192), weight_of(rows, 192)
    bias = weight_of(1, 320)[0] if has_bias else None
    product = RowProduct(weight)
    plain = product(x, bias)
    product.pack()
    assert product.packed is not None
    assert torch.equal(plain, weight_product(x, weight, bias))
    assert torch.equal(product(x, bias), plain)
    product.unpack()
    assert product.packed is None
    product.choose_side(True)
    assert product.right_rows == FEW
    assert torch.equal(product(x, bias), plain)


@needs_bf16
@pytest.mark.parametrize("rows", [4, 9])
@pytest.mark.parametrize("name", OURS)
def test_an_order_gives_the_same_completions_with_each_kind_of_product_and_leaves_no_copies(
    tmp_path: Path, name: str, rows: int
) -> None:
    """A time decides between the kinds, so runs repeat only if all have the same bits."""
    policy = policy_of(tmp_path, name, torch.bfloat16, ADAPTED[1], alpha=8.0)
    engine = HFEngine(policy, tiny_prompter(*range(6)), ActorConfig(max_sequences=rows))
    sampling = Sampling(temperature=0.9, max_new_tokens=PACKED_TOKENS)
    found = []
    for share, right in itertools.product((0.0, 0.5, 1.0), (False, True)):
        engine.packing.share, engine.packing.kinds = share, FasterKinds(packed=share > 0, right=right)
        completions = list(itertools.chain.from_iterable(engine.generate(groups(), sampling, unheard)))
        found.append([(one.ids.tolist(), one.logprobs.tobytes()) for one in completions])
        packed = sum(one.packed is not None for one in engine.row_products())
        assert packed / len(engine.row_products()) == pytest.approx(share, abs=0.3) and bool(packed) == bool(share)
        engine.sleep()
        assert all(one.packed is None for one in engine.row_products())
    assert all(same == found[0] for same in found)


@needs_bf16
def test_a_new_adapter_is_used_with_packed_weights(tmp_path: Path) -> None:
    policy = policy_of(tmp_path, "Qwen2", torch.bfloat16, ADAPTED[1])
    engine = HFEngine(policy, tiny_prompter(*range(6)))
    engine.packing.share, engine.packing.kinds = 1.0, FasterKinds(packed=True, right=False)
    sampling = Sampling(temperature=0.0, max_new_tokens=PACKED_TOKENS)
    first = engine.generate(groups(), sampling, unheard)
    for layer in policy.adapter.layers.values():
        layer.lora_B.data.mul_(-3.0)
    engine.prepare()
    packed = engine.generate(groups(), sampling, unheard)
    engine.sleep()
    engine.packing.kinds = FasterKinds(packed=False, right=True)
    plain = engine.generate(groups(), sampling, unheard)
    numbers = [[one.logprobs.tobytes() for group in found for one in group] for found in (first, packed, plain)]
    assert numbers[1] == numbers[2] != numbers[0]


def packs(share: float = 1.0) -> Packing:
    packing = Packing(share)
    packing.kinds = FasterKinds(packed=True, right=True)
    return packing


def test_what_is_not_worth_it_is_not_packed() -> None:
    product = RowProduct(weight_of(128, 128))
    packs().prepare([product], [], PACKED_TOKENS - 1, ROWS)
    assert product.packed is None, "a short order"
    dense = RowProduct(weight_of(64, 64, torch.float32))
    packs().prepare([dense, product], [], PACKED_TOKENS, ROWS)
    assert dense.packed is None and product.packed is None, "fp32"
    packing = packs()
    packing.kinds = FasterKinds(packed=False, right=False)
    packing.prepare([product], [], PACKED_TOKENS, ROWS)
    assert product.packed is None, "not faster on this machine"


@needs_bf16
def test_as_much_is_packed_as_is_allowed() -> None:
    products = [RowProduct(weight_of(128, 128)) for _ in range(4)]
    packs(0.5).prepare(products, [], PACKED_TOKENS, ROWS)
    assert [product.packed is not None for product in products] == [True, True, False, False]
    packs(0.5).prepare(products, [], PACKED_TOKENS, ROWS)
    assert sum(product.packed is not None for product in products) == 2, "what is packed already counts"
    packs(0.0).prepare(untouched := [RowProduct(weight_of(128, 128))], [], PACKED_TOKENS, ROWS)
    assert untouched[0].packed is None


def large(out: int, size: int) -> RowProduct:
    """Of a weight that takes no memory."""
    return RowProduct(torch.empty(1, 1, dtype=torch.bfloat16).expand(out, size))


@needs_bf16
def test_without_free_memory_nothing_is_packed() -> None:
    enormous = large(2**23, 2**23)
    packs().prepare([enormous], [], PACKED_TOKENS, ROWS)
    assert enormous.packed is None


@needs_bf16
def test_only_a_weight_with_more_outputs_than_inputs_may_be_the_right_factor() -> None:
    wide, long, packing = RowProduct(weight_of(128, 64)), RowProduct(weight_of(64, 128)), Packing(0.0)
    packing.kinds = FasterKinds(packed=False, right=True)
    packing.prepare([wide, long], [], PACKED_TOKENS, ROWS)
    assert (wide.right_rows, long.right_rows) == (FEW, 0)
    packing.kinds = FasterKinds(packed=False, right=False)
    packing.prepare([wide, long], [], PACKED_TOKENS, ROWS)
    assert wide.right_rows == 0


@needs_bf16
def test_kinds_are_measured_with_a_large_weight_but_not_with_a_head() -> None:
    head, long = large(2**16, 2**10), large(2**10, 2**13)
    small, wide = RowProduct(weight_of(128, 64)), large(2**13, 2**10)
    assert [dense is wide.dense for dense in weights_to_measure([small, wide, long, head])] == [True]
    assert weights_to_measure([head, long]) == []
    assert faster_kinds([]) == FasterKinds(packed=False, right=False)
    several = [large(2**13, 2**10) for _ in range(20)]
    assert sum(dense.nbytes for dense in weights_to_measure(several)) == MEASURED_BYTES
    assert use_bf16_units([small, head]) and not use_bf16_units([])


@needs_bf16
def test_measuring_takes_no_random_number_and_no_weight() -> None:
    weight = weight_of(2048, 512)
    before, state = weight.clone(), torch.get_rng_state()
    faster_kinds([weight, before])
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(weight, before)


@needs_bf16
@pytest.mark.parametrize("rows", [1, 8, 24, 40])
@pytest.mark.parametrize("scale", [0.5, 2.0])
def test_a_packed_sum_has_the_bits_of_the_plain_one(rows: int, scale: float) -> None:
    """In a model's shapes; both round once."""
    product = AddedProduct(0.1 * weight_of(32, 320), scale)
    y, x = weight_of(rows, 320), weight_of(rows, 32)
    plain = product(y.clone(), x)
    product.pack()
    assert product.packed is not None
    assert torch.equal(product(y.clone(), x), plain)
    product.unpack()
    assert product.packed is None


def test_a_scale_that_would_be_rounded_leaves_the_sum_as_it_is() -> None:
    product = AddedProduct(weight_of(32, 320), 1.5)
    product.pack()
    assert product.packed is None


@needs_bf16
def test_thin_products_are_packed_beside_the_share(tmp_path: Path) -> None:
    thin, weight = AddedProduct(weight_of(32, 320), 2.0), RowProduct(weight_of(128, 128))
    packs(0.0).prepare([weight], [thin], PACKED_TOKENS, ROWS)
    assert thin.packed is None and weight.packed is None, "nothing may be packed"
    packs(0.01).prepare([weight], [thin], PACKED_TOKENS, ROWS)
    assert thin.packed is not None and weight.packed is None, "the share is of the base"
    policy = policy_of(tmp_path, "Qwen2", torch.bfloat16, ADAPTED[1])
    engine = HFEngine(policy, tiny_prompter(*range(6)))
    assert engine.layers is not None
    low = engine.layers.thin_products()[0]
    low.pack()
    engine.prepare()
    assert low.packed is None, "a new version"


class Reordered:
    """A product that adds its terms in another order when it is packed."""

    def __init__(self, dense: torch.Tensor) -> None:
        self.dense = dense
        self.packed: torch.Tensor | None = None

    def reads_codes(self, rows: int) -> bool:
        return False

    def pack(self) -> None:
        self.packed = self.dense

    def unpack(self) -> None:
        self.packed = None

    def form(self) -> tuple[object, ...]:
        return "reordered", *self.dense.shape

    def stand_in(self) -> "Reordered":
        return Reordered(made_up_weight(*self.dense.shape))

    def sample(self, rows: int) -> torch.Tensor:
        return self.product(made_up_rows(rows, self.dense.shape[1]))

    def product(self, x: torch.Tensor) -> torch.Tensor:
        terms, total = (x.float()[:, None] * self.dense.float()).unbind(2), torch.zeros(())
        for term in terms if self.packed is None else terms[::-1]:
            total = total + term
        return total.bfloat16()


@needs_bf16
@pytest.mark.parametrize("size", [8, 128])
def test_a_product_that_adds_in_another_order_is_not_packed(size: int) -> None:
    """Which the results of usual rows do not show: most are rounded to the same."""
    thin, weight = [Reordered(weight_of(8, size)) for _ in range(2)], RowProduct(weight_of(128, 128))
    plain = thin[0].product(weight_of(8, size))
    thin[0].pack()
    assert torch.equal(thin[0].product(weight_of(8, size)), plain)
    thin[0].unpack()
    packs(0.1).prepare([weight], thin, PACKED_TOKENS, ROWS)
    assert [product.packed for product in thin] == [None, None]


@needs_bf16
def test_a_product_with_other_bits_is_used_in_no_other_way() -> None:
    class OtherBits(RowProduct):
        """On the right, and with rows that lie column by column."""

        def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
            return super().__call__(x, bias) + self.right_rows + (not x.is_contiguous())

        def stand_in(self) -> "OtherBits":
            return OtherBits(made_up_weight(*self.dense.shape))

    wide, long = OtherBits(weight_of(128, 64)), OtherBits(weight_of(64, 128))
    packs(0.0).prepare([wide, long], [], PACKED_TOKENS, ROWS)
    assert (wide.right_rows, long.reads_columns) == (0, False)


@needs_bf16
@pytest.mark.parametrize("shape", [(4, 128), (8, 64), (16, 896), (64, 2048)])
@pytest.mark.parametrize("right_rows", [0, ALL_ROWS])
def test_rows_that_lie_column_by_column_give_the_same_bits(shape: tuple[int, int], right_rows: int) -> None:
    """The smallest shapes have kernels of their own; in large ones, terms are added in blocks."""
    out, size = shape
    product, x = RowProduct(made_up_weight(out, size), right_rows=right_rows), made_up_rows(ROWS, size)
    columns, plain = x.t().contiguous().t(), product(x)
    packing = packs()
    for thin in ([], [product]):
        packing.prepare([RowProduct(weight_of(128, 128))] if thin else [product], thin, PACKED_TOKENS, ROWS)
        assert torch.equal(product(columns), plain)
        assert torch.equal(product(x), plain)
    product.unpack()
    product.reads_columns = False
    assert torch.equal(product(columns), plain)


@needs_bf16
def test_a_stack_gives_the_same_bits_for_rows_that_lie_column_by_column() -> None:
    """A x is a part of x here, and B A x the sum of terms that cancel."""
    linear, x = adapted_linear(64, 2048, rank=8), torch.zeros(ROWS, 2048, dtype=torch.bfloat16)
    linear.base.matmul.dense.zero_()  # pyright: ignore[reportOptionalMemberAccess]
    linear.lora_A.data.copy_(torch.eye(8, 2048))
    x[:, :8] = made_up_rows(ROWS, 8)
    stack = Stack([linear], lambda linears: None)
    stack.prepare(torch.bfloat16)
    for packing in (packs(0.0), packs()):
        packing.prepare(stack.row_products(), list(stack.thin_products()), PACKED_TOKENS, ROWS)
        assert stack.by_a is not None and stack.by_a.reads_columns
        assert torch.equal(stack(x)[0], stack(x.t().contiguous().t())[0])


def adapted_linear(out: int, size: int, rank: int) -> LoraLinear:
    linear = LoraLinear(FrozenLinear(DenseMatmul(weight_of(out, size)), None), (out, size), rank, 2.0)
    linear.lora_A.data.copy_(made_up_weight(rank, size))
    linear.lora_B.data.copy_(made_up_weight(out, rank))
    return linear


NORM = Norm(weight=torch.ones(128, dtype=torch.bfloat16), eps=1e-6)


@needs_bf16
def test_a_norm_gives_the_same_bits_for_heads_that_lie_column_by_column() -> None:
    heads = weight_of(4096, 128).view(8, 512, 128)
    columns = heads.permute(1, 2, 0).contiguous().permute(2, 0, 1)
    assert columns.stride() != heads.stride() and torch.equal(NORM.forward(heads), NORM.forward(columns))
    grad = weight_of(4096, 128).view(8, 512, 128)
    assert torch.equal(NORM.backward(heads, grad), NORM.backward(columns, grad))


@needs_bf16
@pytest.mark.parametrize("with_gradient", [False, True])
def test_an_adapted_linear_gives_the_same_bits_for_rows_that_lie_column_by_column(with_gradient: bool) -> None:
    linear, x = adapted_linear(64, 2048, rank=8).requires_grad_(with_gradient), made_up_rows(ROWS, 2048)
    with torch.set_grad_enabled(with_gradient):
        assert torch.equal(linear(x), linear(x.t().contiguous().t()))


def test_half_of_the_made_up_sums_cancel() -> None:
    x, weight = made_up_rows(4, 129), made_up_weight(5, 129)
    assert x.shape == (4, 129) and weight.shape == (5, 129)
    sums = (x.double() @ weight.double().t()).abs()
    assert sums[::2].max() == 0 and sums[1::2].min() > 0
    assert made_up_weight(2**20, 2**10).numel() == COMPARED_VALUES


@needs_bf16
def test_what_an_earlier_order_has_packed_counts() -> None:
    """A wide order packs what a narrow one reads as codes."""
    codes = CodedWeight(codes=torch.zeros(128, 64, dtype=torch.uint8), scales=torch.zeros(1, 128, dtype=torch.bfloat16))
    products, packing = [RowProduct(weight_of(128, 128), codes), RowProduct(weight_of(128, 128))], packs(0.5)
    packing.prepare(products, [], PACKED_TOKENS, CODED_ROWS + 1)
    assert [product.packed is not None for product in products] == [True, False]
    packing.prepare(products, [], PACKED_TOKENS, CODED_ROWS)
    assert products[1].packed is None, "half of both is packed already"
    for product in products:
        product.unpack()
    packing.prepare(products, [], PACKED_TOKENS, CODED_ROWS)
    assert [product.packed is not None for product in products] == [False, True]
