"""Measures how fast this machine computes, in a process of its own (launch/plan/machine.py starts it).

Products, head and sampler are measured by calling the functions of a run. What layers take besides the products of the
base is solved from layers of two sizes:

    values      how many values a layer's products with the base give, over all rows
    per value   (time of a narrow layer, less its products, less the time of a tiny layer)
                / (values of the narrow layer, less those of the tiny one)
    calls       time of a tiny layer, less its values x per value

Calls are Python and hundreds of small operations: in a token step of the decode loop, and in forward and backward of a
micro-batch. Beside them, each value is read and written many times: in norms, activations, attention and the products
of the adapter. The measured functions are those of a run, with an adapter on every linear. Both times differ more than
twofold between machines, and timing one operation does not predict them.

Left out: the products of a tiny layer, ranks other than the default, an adapter that is packed or read as codes, and
that small prompts are copied to their rows, which takes fewer calls.
"""

import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle
from statistics import median
from typing import Any

import msgspec
import torch

from actor.engines.token_step.coded import CodedWeight, reads_codes
from actor.engines.token_step.eight_bit import EightBitHead, multiplies_eight_bits
from actor.engines.token_step.packed import (
    RowProduct,
    faster_kinds,
    packed_has_same_bits,
    right_factor_has_same_bits,
)
from launch.plan.machine import ROWS, SAMPLER_ROWS, LayerTimes, OtherTimes, Rates, Speed
from launch.plan.timed_compiled import compiled_times
from launch.plan.timed_layers import (
    GROUP,
    NARROW,
    TINY,
    TOKEN_STEP_PROMPTS,
    VOCABULARY,
    WEIGHTS_BYTES,
    Timed,
    TwoDepths,
    head_s,
    head_values,
    solved,
    token_step,
    update_times,
)
from shared.config.processes import CODED_ROWS
from shared.model.layers.products import product_of_largest
from shared.model.sampler import draw
from shared.process.determinism import pin_torch

FRESH_BYTES = 128 * 2**20
"""More than the C library keeps when it is freed."""
OUT, IN, BLOCK = 2048, 1024, 64
ENOUGH_S = 0.08
"""Each measurement is repeated for about this long."""
TRIED_ROWS, SLOW_S = 8, 0.02
"""A product of so few rows that takes longer is not measured with more."""


def usual_time(*work: Callable[[], object]) -> float:
    """Seconds of a call, the median. The fastest one would be of moments that a run does not consist of. All are called
    in turn for a while; the first round does not count. Of calls that take longer than that, two are made."""
    until = time.perf_counter() + ENOUGH_S
    for call in work:
        call()
        if time.perf_counter() >= until:
            break
    found, until = list[float](), time.perf_counter() + ENOUGH_S
    for call in cycle(work):
        start = time.perf_counter()
        call()
        end = time.perf_counter()
        found.append(end - start)
        if end >= until:
            break
    return median(found)


def measure(threads: int, dtype: str) -> Speed:
    """In this process, which must have been started for it."""
    pin_torch(threads)
    torch.manual_seed(0)
    logits = torch.randn(SAMPLER_ROWS, VOCABULARY)
    uniforms = torch.rand(SAMPLER_ROWS, dtype=torch.float64)
    small, large = torch.randn(8, 8), torch.randn(4 * 2**20)
    with torch.inference_mode():
        sampler = usual_time(lambda: draw(logits, uniforms)) / logits.numel()
        operation = usual_time(lambda: [small + small for _ in range(100)]) / 100
        byte = usual_time(lambda: large * 2.0) / (2 * 4 * large.numel())
        fresh = usual_time(lambda: torch.empty(FRESH_BYTES, dtype=torch.uint8).fill_(1)) / FRESH_BYTES
    rates = measure_rates({"fp32": torch.float32, "bf16": torch.bfloat16}[dtype])
    return Speed(rates=rates, sampler=sampler, operation=operation, byte=byte, fresh=fresh)


def measure_rates(dtype: Any) -> Rates:
    count = WEIGHTS_BYTES // (OUT * IN * dtype.itemsize)
    weights = [torch.randn(OUT, IN).to(dtype) for _ in range(count)]
    kinds, every = faster_kinds(weights), [RowProduct(weight) for weight in weights]
    packs = kinds.packed and packed_has_same_bits(every[0])
    is_right = kinds.right and right_factor_has_same_bits(every[0])
    for one in every:
        one.choose_side(is_right)
    xs = [torch.randn(rows, IN).to(dtype) for rows in ROWS]
    grad = torch.randn(ROWS[-1], OUT).to(dtype)
    with torch.inference_mode():
        product = tuple(usual_time(*(partial(one, x) for one in every)) / (OUT * IN) for x in xs)
        gradient = gradient_time(grad, weights[:4]) / (OUT * IN)
    head = head_values(IN, dtype)
    hidden = torch.randn(SAMPLER_ROWS, IN).to(dtype)
    whole = head_s(head, usual_time)
    of_head = RowProduct(head)
    of_head.choose_side(is_right)
    with torch.inference_mode():
        head_token_step = usual_time(lambda: product_of_largest(hidden, head, of_head)) / head.numel()
        packing = time_to_pack(every) if packs else 0.0
        packed = tuple(usual_time(*(partial(one, x) for one in every)) / (OUT * IN) for x in xs) if packs else product
    return Rates(
        product=product,
        gradient=gradient,
        head=whole,
        head_token_step=head_token_step,
        packed=packed,
        packing=packing,
        coded=coded_times(dtype, xs),
        eight_bit=eight_bit_times(dtype, xs),
        compiled=compiled_times(dtype, usual_time),
        layer=layer_times(dtype, usual_time),
    )


def coded_times(dtype: Any, xs: Sequence[Any]) -> tuple[float, ...]:
    """Seconds per weight, up to CODED_ROWS."""
    if dtype != torch.bfloat16 or not reads_codes():
        return ()
    count = WEIGHTS_BYTES // (OUT * IN // 2)
    scales = torch.full((IN // BLOCK, OUT), 0.01, dtype=dtype)
    weights = [
        CodedWeight(codes=torch.randint(256, (OUT, IN // 2), dtype=torch.uint8), scales=scales) for _ in range(count)
    ]
    few = [x for x in xs if len(x) <= CODED_ROWS]
    return tuple(usual_time(*(partial(one.product, x, None) for one in weights)) / (OUT * IN) for x in few)


def eight_bit_times(dtype: Any, xs: Sequence[Any]) -> tuple[float, ...]:
    """Seconds per weight for all numbers of rows."""
    if dtype != torch.bfloat16 or not multiplies_eight_bits():
        return ()
    heads = [EightBitHead.of(torch.randn(OUT, IN)) for _ in range(WEIGHTS_BYTES // (OUT * IN))]
    return tuple(usual_time(*(partial(one, x) for one in heads)) / (OUT * IN) for x in xs)


def gradient_time(grad: Any, weights: Sequence[Any]) -> float:
    """Seconds of `dy W`. Processors without units for bf16 take seconds for 512 rows, and 64 times as long as for 8."""
    few = usual_time(partial(grad[:TRIED_ROWS].matmul, weights[0]))
    if few > SLOW_S:
        return few * len(grad) / TRIED_ROWS
    return usual_time(*(partial(grad.matmul, weight) for weight in weights))


def time_to_pack(products: Sequence[Any]) -> float:
    """Seconds per weight."""
    start = time.perf_counter()
    for product in products:
        product.pack()
    return (time.perf_counter() - start) / sum(product.dense.numel() for product in products)


def layer_times(dtype: torch.dtype, timed: Timed) -> LayerTimes:
    tiny, narrow = (TwoDepths.of(size, dtype) for size in (TINY, NARROW))
    plain, update = token_step_times(tiny, narrow, timed), update_times(tiny, narrow, timed)
    if dtype != torch.float32:
        # Only fp32 weights are summed with the adapter.
        return LayerTimes(token_step=plain, folded_token_step=plain, update=update)
    for policy in (tiny.shallow, tiny.deep, narrow.shallow, narrow.deep):
        policy.adapter.fold()
    return LayerTimes(token_step=plain, folded_token_step=token_step_times(tiny, narrow, timed), update=update)


def token_step_times(tiny: "TwoDepths", narrow: "TwoDepths", timed: Timed) -> OtherTimes:
    tiny_s, narrow_s = tiny.layer_s(timed, token_step, 1), narrow.layer_s(timed, token_step, TOKEN_STEP_PROMPTS)
    rows = TOKEN_STEP_PROMPTS * GROUP
    return solved(tiny_s, narrow_s, narrow.forward_s(timed, rows), GROUP * tiny.outputs, rows * narrow.outputs)


if __name__ == "__main__":
    print(msgspec.json.encode(measure(int(sys.argv[1]), sys.argv[2])).decode())
