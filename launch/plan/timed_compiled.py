"""Measures C code, as measuring.py does PyTorch's operations: the token step (actor/engines/token_step/compiled), and
an update that takes it between its products (shared/model/compiled).

What a step of a wide model takes beyond the other times is the time of its products: with dense weights and, in bf16,
with codes. A head in 8 bits is multiplied and finished as in a run.
"""

import tempfile
from functools import cache, partial
from pathlib import Path

import torch

from actor.engines.token_step.compiled.head import CompiledHead, TiledHead
from actor.engines.token_step.compiled.library import Library, library_for
from actor.engines.token_step.compiled.step import CompiledDraw, CompiledLayers
from actor.engines.token_step.compiled.stored_codes import StoredWeight
from launch.plan.machine import ROWS, SAMPLER_ROWS, CompiledTimes, CompiledUpdate, OtherTimes
from launch.plan.timed_layers import (
    GROUP,
    NARROW,
    TINY,
    TOKEN_STEP_PROMPTS,
    VOCABULARY,
    WEIGHTS_BYTES,
    WIDE,
    MakeLayers,
    Timed,
    TwoDepths,
    head_s,
    head_values,
    small_policy,
    solved,
    token_step,
    update_times,
)
from shared.model.compiled.kernels import load_kernels
from shared.model.layers.nf4 import BLOCK
from shared.model.policy import Kernels, Policy
from shared.process.processor import AVX2_FLAG, EIGHT_BIT_FLAG, VBMI_FLAG, read_flags
from shared.run.run_dir import CPUINFO

WIDTH = 1024
CODE_BYTES = 0.5 + 4 / BLOCK
"""Of a weight as codes, with its scale."""


def compiled_times(dtype: torch.dtype, timed: Timed) -> CompiledTimes | None:
    """None where it cannot be compiled."""
    with tempfile.TemporaryDirectory() as folder:
        library = library_for(dtype, Path(folder))
        update = update_in_c(dtype, Path(folder), timed)
    if library is None:
        return None
    make = partial(CompiledLayers, library=library)
    tiny, narrow = (TwoDepths.of(size, dtype) for size in (TINY, NARROW))
    plain = folded = compiled_layer_times(tiny, narrow, make, timed)
    logits, uniforms = torch.randn(SAMPLER_ROWS, VOCABULARY), torch.rand(SAMPLER_ROWS, dtype=torch.float64)
    drawn_s = timed(partial(CompiledDraw(library), logits, uniforms)) / logits.numel()
    product = wide_products(dtype.itemsize, dtype, make, plain, timed)
    coded = head = ()
    if dtype == torch.float32:
        for policy in (tiny.shallow, tiny.deep, narrow.shallow, narrow.deep):
            policy.adapter.fold()
        folded = compiled_layer_times(tiny, narrow, make, timed)
    elif {VBMI_FLAG, EIGHT_BIT_FLAG} <= read_flags(CPUINFO):
        coded = wide_products(CODE_BYTES, dtype, partial(coded_layers, library=library), plain, timed)
        head = head_times(library, dtype, timed)
    return CompiledTimes(
        product=product,
        coded=coded,
        head=head,
        token_step=plain,
        folded_token_step=folded,
        sampler=drawn_s,
        update=update,
    )


def update_in_c(dtype: torch.dtype, folder: Path, timed: Timed) -> CompiledUpdate | None:
    found = load_kernels(dtype, folder) if AVX2_FLAG in read_flags(CPUINFO) else None
    if found is None:
        return None
    kernels = Kernels(sums=found.sums, math=found.math)
    tiny, narrow = (TwoDepths.of(size, dtype).with_kernels(kernels) for size in (TINY, NARROW))
    head = head_s(head_values(WIDTH, dtype), timed, found.sums)
    return CompiledUpdate(layer=update_times(tiny, narrow, timed), head=head)


def coded_layers(policy: Policy, library: Library) -> CompiledLayers:
    """With made-up codes, as different in memory as those of a model."""

    def codes_of(linear: str) -> StoredWeight:
        count = policy.lm.get_submodule(linear).base.matmul.dense.numel()
        codes = torch.randint(256, (count // 2, 1), dtype=torch.uint8)
        return StoredWeight(codes=codes, scales=torch.full((count // BLOCK,), 0.01), levels=torch.linspace(-1, 1, 16))

    return CompiledLayers(policy, library, cache(codes_of))


def head_times(library: Library, dtype: torch.dtype, timed: Timed) -> tuple[float, ...]:
    """Seconds per weight for each of ROWS."""
    weight = torch.randn(VOCABULARY, WIDTH).to(dtype).repeat(WEIGHTS_BYTES // (VOCABULARY * WIDTH), 1)
    logits_of = CompiledHead(library, TiledHead.of(weight), weight)
    return tuple(timed(partial(logits_of, torch.randn(rows, WIDTH).to(dtype))) / weight.numel() for rows in ROWS)


def wide_products(
    weight_bytes: float, dtype: torch.dtype, make: MakeLayers, other: OtherTimes, timed: Timed
) -> tuple[float, ...]:
    """Seconds per weight for each of ROWS. weight_bytes: of a weight as it is read."""
    wide = small_policy(WIDE, max(1, int(WEIGHTS_BYTES / (WIDE.weights * weight_bytes))), dtype)
    # Fewer rows take as long.
    few = wide_product_s(wide, make, 1, other, timed)
    return few, *(wide_product_s(wide, make, rows // GROUP, other, timed) for rows in ROWS[1:])


def compiled_layer_times(tiny: TwoDepths, narrow: TwoDepths, make: MakeLayers, timed: Timed) -> OtherTimes:
    """Of layers so small that their products count as a part of it."""
    call = partial(token_step, make=make)
    tiny_s, narrow_s = tiny.layer_s(timed, call, 1), narrow.layer_s(timed, call, TOKEN_STEP_PROMPTS)
    return solved(tiny_s, narrow_s, 0.0, GROUP * tiny.outputs, TOKEN_STEP_PROMPTS * GROUP * narrow.outputs)


def wide_product_s(policy: Policy, make: MakeLayers, prompts: int, other: OtherTimes, timed: Timed) -> float:
    """Seconds per weight: what a step takes beyond the other times, a third of it at least."""
    step_s, linears = timed(token_step(policy, prompts, make=make)), policy.adapter.layers.values()
    weights = sum(one.base.matmul.dense.numel() for one in linears if one.base.matmul.dense is not None)
    values = prompts * GROUP * sum(len(one.lora_B) for one in linears)
    beside = policy.config.num_hidden_layers * other.calls + values * other.per_value
    return max(step_s - beside, step_s / 3) / weights
