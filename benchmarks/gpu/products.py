"""Products with NF4 weights and with the head, and our own kernels, at a model's shapes, against the card's ceilings.

    floor = max(bytes that must move / bandwidth, operations / rate)        roofline = floor / measured time

Bytes: codes and scales once (or dense bf16 values), input and output once. The ceilings are measured first (facts.py).
Each weight exists several times, and calls go round these copies, so that none finds its weight in the card's cache.
Calls are captured in a CUDA graph, so that the host does not count; where that fails, plain calls are timed.

    dequantised  the weight is dequantised, then multiplied, as with gradients
    layer        as without gradients: bitsandbytes' own product from the codes
    dense        the product with dense bf16 values
"""

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.gpu.facts import ceilings
from benchmarks.gpu.measured import Note, Place, timed
from benchmarks.gpu.random_base import SHAPES
from benchmarks.gpu.shapes import R1
from benchmarks.kernels import copied_per_s, measured, random_policy
from shared.model.kernels.toolchain import look_at_toolchain, missing
from shared.model.kernels.trial import TRIALS, difference
from shared.model.layers.lora import DequantizingMatmul
from shared.model.layers.nf4 import BLOCK, kernel_values, quantize
from shared.model.layers.products import product_fp32

ROWS = (1, 8, 64, 512, 4096)
COPIES = 16
ROUNDS = 5
Call = Callable[[torch.Tensor], torch.Tensor]


def linear_shapes(model: str) -> list[tuple[int, int]]:
    """(out, in) of a layer's matrices, each once."""
    sizes = SHAPES[model]
    hidden, inner = sizes["hidden_size"], sizes["intermediate_size"]
    keys = hidden // sizes["num_attention_heads"] * sizes["num_key_value_heads"]
    return [(hidden, hidden), (keys, hidden), (inner, hidden), (hidden, inner)]


def products(place: Place, note: Note) -> None:
    model = place.shape(R1.model)
    best = ceilings(place)
    note(ceilings=best)
    rows = ROWS[: place.size(len(ROWS), 2)]
    for outputs, inputs in linear_shapes(model):
        cases = nf4_cases(outputs, inputs, place)
        found = {
            name: [against_floor(place, best, calls, num_bytes, n, (outputs, inputs)) for n in rows]
            for name, (calls, num_bytes) in cases.items()
        }
        note(**{f"{outputs}x{inputs}": found})
    sizes = SHAPES[model]
    note(head=[head_case(place, best, n, sizes["vocab_size"], sizes["hidden_size"]) for n in rows[:4]])


def kernels(place: Place, note: Note) -> None:
    """Ours in Triton against PyTorch's, as in benchmarks/kernels.py; in a dry run, only whether they agree."""
    if lacks := missing(look_at_toolchain()):
        note(skipped="; ".join(f"{lack.found}: {lack.remedy}" for lack in lacks))
        return
    sizes = SHAPES[place.shape(R1.model)]
    asked = {"hidden": sizes["hidden_size"], "inner": sizes["intermediate_size"], "vocabulary": sizes["vocab_size"]}
    policy = random_policy(argparse.Namespace(**asked, rank=16, dtype="bf16"), place.device)
    for name, make in TRIALS.items():
        trial = make(policy)
        if place.device.type == "cuda":
            note(**{name: measured(trial, copied_per_s(place.device))})
        else:
            note(**{name: difference(trial)})


def nf4_cases(outputs: int, inputs: int, place: Place) -> dict[str, tuple[list[Call], float]]:
    """Name -> calls over copies of one weight, and the bytes of a weight."""
    weights = [
        quantize(torch.randn(outputs, inputs, device=place.device, dtype=torch.bfloat16) * 0.02)
        for _ in range(place.size(COPIES, 1))
    ]
    layers = [DequantizingMatmul(weight) for weight in weights]
    codes = outputs * inputs * (0.5 + 1 / BLOCK)
    dense = [weight.dequantize(torch.bfloat16) for weight in weights]
    return {
        "dequantised": ([dequantised(layer, inputs) for layer in layers], codes),
        "layer": ([without_bias(layer) for layer in layers], codes),
        "dense": ([multiplied(weight) for weight in dense], 2.0 * outputs * inputs),
    }


def dequantised(layer: DequantizingMatmul, inputs: int) -> Call:
    return lambda x: F.linear(x, kernel_values(layer.packed, layer.state, x.dtype).view(-1, inputs))


def without_bias(layer: DequantizingMatmul) -> Call:
    return lambda x: layer(x, None)


def multiplied(weight: torch.Tensor) -> Call:
    return lambda x: F.linear(x, weight)


def head_case(place: Place, best: dict[str, float], rows: int, vocabulary: int, hidden: int) -> dict[str, Any]:
    """Logits in fp32, as they are sampled from."""
    weight = torch.randn(vocabulary, hidden, device=place.device, dtype=torch.bfloat16)
    calls: list[Call] = [lambda x: product_fp32(x, weight.t())]
    num_bytes = 2.0 * vocabulary * hidden + 2.0 * rows * vocabulary
    return against_floor(place, best, calls, num_bytes, rows, (vocabulary, hidden))


def against_floor(
    place: Place, best: dict[str, float], calls: Sequence[Call], num_bytes: float, rows: int, shape: tuple[int, int]
) -> dict[str, Any]:
    """One number of rows."""
    outputs, inputs = shape
    x = torch.randn(rows, inputs, device=place.device, dtype=torch.bfloat16)
    way, seconds = time_of(calls, x, place)
    moved = num_bytes + 2.0 * rows * (inputs + outputs)
    floor = max(moved / (best["gb_per_s"] * 1e9), 2.0 * rows * outputs * inputs / (best["bf16_tflop_per_s"] * 1e12))
    return {"rows": rows, "us": round(seconds * 1e6, 2), "roofline": round(floor / seconds, 4), "by": way}


def time_of(calls: Sequence[Call], x: torch.Tensor, place: Place) -> tuple[str, float]:
    """Seconds of a call: the best of some rounds over all copies."""

    def once() -> None:
        with torch.no_grad():
            for call in calls:
                call(x)

    once()
    way, work = "calls", once
    if place.device.type == "cuda":
        way, work = captured(once)
    seconds = min(timed(work, place.device)[0] for _ in range(place.size(ROUNDS, 1)))
    return way, seconds / len(calls)


def captured(work: Callable[[], None]) -> tuple[str, Callable[[], None]]:
    """As a graph, if every operation allows it."""
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            work()
    except RuntimeError:
        return "calls", work
    return "graph", graph.replay
