"""Products of a token step at half a billion parameters: bf16 weights against fp32 and against 8 and 4 bits, read
directly.

    fp32 MKL      `F.linear` with fp32 weights
    fp32          `RowProduct`, oneDNN where `is_for_onednn`, and `fp32 packed` the same in oneDNN's layout
    bf16          `weight_product` with the dense base that both processes map
    bf16 packed   the same in oneDNN's layout (actor/engines/token_step/packed.py), where the processor has bf16 units
    nf4 codes     bitsandbytes' product with NF4 codes (actor/engines/token_step/coded.py), with AVX512-BF16 only
    int8 weights  torch's `_weight_int8pack_mm`: W in int8 with a scale for each row, x in bf16
    int4 weights  torch's `_weight_int4pack_mm_for_cpu`: groups of 64 with scale and zero, x in bf16
    int8 both     oneDNN's `qlinear`: W in int8, x in uint8 over the range of each of its rows, sums in int32
                  (actor/engines/token_step/eight_bit.py)

Each time is of one product of the gate's shape (4864 x 896), averaged over the 24 matrices of a model one after the
other, so that weights come from memory and not from a cache. The error is that of the result against fp32, relative to
its norm; the weights are random, which is harder for 4 bits than real ones. For NF4 it is against the values of the
codes, which are the base: the policy itself is the quantised model.
Left out: bitsandbytes' `gemm_4bit` for CPUs, which needs a package that it downloads at the first use.

    python -m benchmarks.low_bit [--threads 2]
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from actor.engines.token_step.coded import CodedWeight, reads_codes
from actor.engines.token_step.eight_bit import EightBitHead
from actor.engines.token_step.packed import RowProduct
from benchmarks.timed_shapes import in_turn, time_shapes
from shared.base.interleaved import interleaved, scales_of
from shared.model.layers.nf4 import NF4Weight, quantize
from shared.model.layers.products import weight_product

LAYERS, OUT, IN, BLOCK = 24, 4864, 896, 64
SHAPES = {f"{rows} rows": (rows,) for rows in (1, 8, 32)}
SLOW_S = 0.02
"""A kind that takes longer for one product is hopeless on this processor, and is measured once."""
Product = Callable[[torch.Tensor], torch.Tensor]


def packed_product(weight: torch.Tensor) -> Product:
    product = RowProduct(weight)
    product.pack()
    return product


def widened(product: Product) -> Product:
    return lambda x: product(x.float())


def nf4_codes(weight: NF4Weight) -> Product:
    """With a copy of the codes, so that they are in no cache."""
    coded = CodedWeight(codes=interleaved(weight), scales=scales_of(weight).contiguous())
    return lambda x: coded.product(x, None)


def seconds(product: Product, x: torch.Tensor) -> float:
    """Of the second call."""
    product(x)
    start = time.perf_counter()
    product(x)
    return time.perf_counter() - start


def int8_weights(weight: torch.Tensor) -> Product:
    scales = weight.abs().amax(dim=1) / 127
    codes, scales = (weight / scales[:, None]).round().to(torch.int8), scales.bfloat16()
    return lambda x: torch.ops.aten._weight_int8pack_mm(x, codes, scales)


def int4_weights(weight: torch.Tensor) -> Product:
    blocks = weight.view(OUT, IN // BLOCK, BLOCK)
    low, high = blocks.amin(dim=2), blocks.amax(dim=2)
    scales = (high - low) / 15
    codes = ((blocks - low[..., None]) / scales[..., None]).round().clamp(0, 15).to(torch.int32).view(OUT, IN)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    # The kernel's codes are centred: value = (code - 8) * scale + zero.
    facts = torch.stack([scales, low + 8 * scales], dim=2).transpose(0, 1).contiguous().bfloat16()
    return lambda x: torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, BLOCK, facts)


def int8_both(weight: torch.Tensor) -> Product:
    head = EightBitHead.of(weight)
    return lambda x: head(x).bfloat16()


def measured(rows: int) -> dict[str, Any]:
    """Microseconds of one product and the error, for each kind of weights."""
    weights = [torch.randn(OUT, IN) for _ in range(LAYERS)]
    x = torch.randn(rows, IN).bfloat16()
    dense = [weight.bfloat16() for weight in weights]
    products: dict[str, list[Product]] = {
        "bf16": [lambda x, weight=weight: weight_product(x, weight) for weight in dense],
        "int8 weights": [int8_weights(weight) for weight in weights],
        "int4 weights": [int4_weights(weight) for weight in weights],
        "int8 both": [int8_both(weight) for weight in weights],
        "fp32 MKL": [widened(partial(F.linear, weight=weight)) for weight in weights],
        "fp32": [widened(RowProduct(weight)) for weight in weights],
        "fp32 packed": [widened(packed_product(weight)) for weight in weights],
    }
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        products["bf16 packed"] = [packed_product(weight) for weight in dense]
    wanted: dict[str, torch.Tensor] = {}
    if reads_codes():
        base = quantize(weights[0])
        products["nf4 codes"] = [nf4_codes(base) for _ in weights]
        wanted["nf4 codes"] = base.dequantize(torch.float32)
    once = {name: seconds(kind[0], x) for name, kind in products.items()}
    timed = {name: kind for name, kind in products.items() if once[name] <= SLOW_S}
    medians = in_turn(*(lambda kind=kind: [product(x) for product in kind] for kind in timed.values()))
    found = dict(zip(timed, medians, strict=True))
    times = [found.get(name, 1e6 * LAYERS * once[name]) for name in products]
    exact = {name: x.float() @ wanted.get(name, weights[0]).t() for name in products}
    return {
        name: {
            "us": round(time / LAYERS, 1),
            "times_faster": round(times[0] / time, 2),
            "error": round(float((kind[0](x).float() - exact[name]).norm() / exact[name].norm()), 4),
        }
        for (name, kind), time in zip(products.items(), times, strict=True)
    }


if __name__ == "__main__":
    torch.manual_seed(0)
    time_shapes("low_bit", SHAPES, measured)
