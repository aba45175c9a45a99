"""Draw one token per row, with log-prob and entropy, in two launches that read the logits once.

    m_b = max z,   s_b = sum exp(z - m_b),   u_b = sum exp(z - m_b) (z - m_b)            over the tokens of block b
    m = max m_b,   f_b = exp(m_b - m),   S = sum f_b s_b,   U = sum f_b (u_b + s_b (m_b - m))
    block = first b with  sum_{i <= b} f_i s_i > u S,   token = first j of it with  what came before + f_b sum w > u S
    log p_t = z_t - m - log S,   H = log S - U / S

The torch version is `draw` of shared/model/sampler.py, with the same blocks: it goes over the vocabulary six times, in
twenty operations. Here one program for each block of each row gives m_b, s_b and u_b, and one for each row does the
rest, for which it reads a single block again. As there, a token without a weight is never drawn. Sums are float64.
Without uniforms the token is the most likely one, the first of several.

Unlike the torch version, this one does not overwrite the logits. It neither waits for the card nor asks it anything, so
it can be part of a CUDA graph.
"""

import torch
import triton.language as tl  # pyright: ignore[reportMissingImports]

from shared.model.kernels.toolchain import jit, power_of_two
from shared.model.sampler import BLOCK, DrawnTokens


def draw(logits: torch.Tensor, uniforms: torch.Tensor | None) -> DrawnTokens:
    """logits [B, V]; uniforms [B] float64 (None: the most likely token)."""
    rows, size = logits.shape
    blocks, device = -(-size // BLOCK), logits.device
    largest = torch.empty((rows, blocks), device=device)
    sums = torch.empty((rows, blocks), dtype=torch.float64, device=device)
    means = torch.empty_like(largest)
    block_sums[(rows, blocks)](logits, largest, sums, means, size, logits.stride(0), blocks, BLOCK=BLOCK)
    ids = torch.empty(rows, dtype=torch.int64, device=device)
    logprobs = torch.empty(rows, device=device)
    entropies = torch.empty_like(logprobs)
    choose[(rows,)](
        logits,
        logprobs if uniforms is None else uniforms,
        largest,
        sums,
        means,
        ids,
        logprobs,
        entropies,
        size,
        logits.stride(0),
        blocks,
        GREEDY=uniforms is None,
        BLOCK=BLOCK,
        BLOCKS=power_of_two(blocks),
    )
    return DrawnTokens(ids=ids, logprobs=logprobs, entropies=entropies)


@jit
def block_sums(
    logits: tl.tensor,
    largest: tl.tensor,
    sums: tl.tensor,
    means: tl.tensor,
    size: tl.tensor,
    stride: tl.tensor,
    blocks: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """m_b, s_b and u_b of one block of one row."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    z = tl.load(logits + row * stride + columns, mask=inside, other=-3.0e38).to(tl.float32)
    top = tl.max(z, axis=0)
    weight = tl.where(inside, tl.exp(z - top), 0.0)
    place = row * blocks + block
    tl.store(largest + place, top)
    tl.store(sums + place, tl.sum(weight.to(tl.float64), axis=0))
    # A token without a weight adds nothing, even if its logit is minus infinity.
    tl.store(means + place, tl.sum(tl.where(weight > 0.0, weight * (z - top), 0.0), axis=0))


@jit
def choose(
    logits: tl.tensor,
    uniforms: tl.tensor,
    largest: tl.tensor,
    sums: tl.tensor,
    means: tl.tensor,
    ids: tl.tensor,
    logprobs: tl.tensor,
    entropies: tl.tensor,
    size: tl.tensor,
    stride: tl.tensor,
    blocks: tl.tensor,
    GREEDY: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    """One row: its block, the token in it, and the statistics."""
    row = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, BLOCKS)
    exists = places < blocks
    tops = tl.load(largest + row * blocks + places, mask=exists, other=-3.0e38)
    top = tl.max(tops, axis=0)
    below = tops.to(tl.float64) - top.to(tl.float64)
    fade = tl.exp(below)
    part = fade * tl.load(sums + row * blocks + places, mask=exists, other=0.0)
    mean = fade * tl.load(means + row * blocks + places, mask=exists, other=0.0).to(tl.float64)
    total = tl.sum(part, axis=0)
    spread = tl.sum(mean + tl.where(part > 0.0, part * below, 0.0), axis=0)
    if GREEDY:
        threshold = total
        block = tl.min(tl.where(exists & (tops == top), places, BLOCKS - 1), axis=0)
    else:
        threshold = tl.load(uniforms + row).to(tl.float64) * total
        # A running sum is rounded, and may grow by that where there is no weight.
        last = tl.max(tl.where(part > 0.0, places, 0), axis=0)
        reached = (tl.cumsum(part, axis=0) > threshold) & (part > 0.0)
        block = tl.min(tl.where(reached, places, last), axis=0)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    z = tl.load(logits + row * stride + columns, mask=columns < size, other=-3.0e38).to(tl.float32)
    own = tl.max(z, axis=0)
    if GREEDY:
        token = tl.min(tl.where(z == own, columns, size - 1), axis=0)
    else:
        before = tl.sum(tl.where(places < block, part, 0.0), axis=0)
        weight = tl.where(columns < size, tl.exp(z - own), 0.0).to(tl.float64)
        scale = tl.exp(own.to(tl.float64) - top.to(tl.float64))
        last = tl.max(tl.where(weight > 0.0, columns, block * BLOCK), axis=0)
        reached = (tl.cumsum(weight, axis=0) * scale > threshold - before) & (weight > 0.0)
        token = tl.min(tl.where(reached, columns, last), axis=0)
    # Logits that are not numbers must not lead outside the row.
    token = tl.minimum(token, size - 1)
    logit = tl.sum(tl.where(columns == token, z, 0.0), axis=0)
    log_total = tl.log(total)
    tl.store(ids + row, token.to(tl.int64))
    tl.store(logprobs + row, (logit.to(tl.float64) - top.to(tl.float64) - log_total).to(tl.float32))
    tl.store(entropies + row, (log_total - spread / total).to(tl.float32))
