"""Draw one token per row from softmax(logits), with log-prob and entropy of what was drawn.

    w_j = exp(z_j - max z),   S = sum_j w_j,   log p_t = z_t - max z - log S
    token = first j with  sum_{i <= j} w_i > u S,   u ~ U[0, 1) from the completion's own stream
    H = log S - sum_j w_j (z_j - max z) / S

A row's draw depends on its own logits and its own u alone, never on the other rows. Sums are float64, or the tail of a
large vocabulary would be lost to rounding. The search is in two levels: over the sums of blocks of tokens, then inside
one block, so the running sum of a whole vocabulary is never formed. A large vocabulary is gone through a few rows at a
time, which stay in the cache of the core; on a card, at once. Every token can be drawn: no top-k, no top-p.
shared/model/kernels/sampler.py does the same in two launches.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

BLOCK = 1024
"""Tokens in a block."""
AT_ONCE = 2**18
"""Logits gone through at once."""


@dataclass(frozen=True, kw_only=True)
class DrawnTokens:
    """One token for each row."""

    ids: torch.Tensor
    """[B] int64."""
    logprobs: torch.Tensor
    """[B] fp32."""
    entropies: torch.Tensor
    """[B] fp32, nats."""


Draw = Callable[[torch.Tensor, torch.Tensor | None], DrawnTokens]


def draw(logits: torch.Tensor, uniforms: torch.Tensor | None) -> DrawnTokens:
    """logits [B, V] fp32, which are overwritten; uniforms [B] float64 (None: the most likely token)."""
    rows, size = logits.shape
    sums = torch.empty((rows, -(-size // BLOCK)), dtype=torch.float64, device=logits.device)
    mean = torch.empty(rows, device=logits.device)
    at_once = max(1, AT_ONCE // size if logits.is_cpu else rows)
    for start in range(0, rows, at_once):
        part = slice(start, start + at_once)
        shifted = logits[part]
        shifted -= shifted.amax(dim=-1, keepdim=True)
        weights = shifted.exp()
        block_sums(weights, sums[part])
        torch.sum(weights.mul_(shifted), dim=-1, out=mean[part])
    total = sums.sum(dim=-1)
    if uniforms is None:
        ids = logits.argmax(dim=-1)
    elif size <= BLOCK:
        ids = first_above(logits.exp(), (uniforms * total)[:, None])
    else:
        ids = inverse_cdf(sums, uniforms, size, lambda columns: logits.gather(1, columns).exp_())
    log_total = total.log()
    return DrawnTokens(
        ids=ids,
        logprobs=(logits.gather(1, ids[:, None]).squeeze(1) - log_total).float(),
        entropies=(log_total - mean / total).float(),
    )


def block_sums(weights: torch.Tensor, out: torch.Tensor) -> None:
    """[B, V] -> [B, blocks] float64; the last block may be short."""
    whole = weights.shape[1] // BLOCK
    if whole:
        blocks = weights[:, : whole * BLOCK].unflatten(1, (whole, BLOCK))
        torch.sum(blocks, dim=-1, dtype=torch.float64, out=out[:, :whole])
    if whole < out.shape[1]:
        torch.sum(weights[:, whole * BLOCK :], dim=-1, dtype=torch.float64, out=out[:, whole])


def inverse_cdf(
    sums: torch.Tensor, uniforms: torch.Tensor, size: int, weights_at: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """[B, blocks] sums, [B] -> [B] ids below `size`; u is scaled by the row's own sum. weights_at: [B, columns] ids ->
    their weights."""
    upto = sums.cumsum(dim=-1)
    threshold = uniforms[:, None] * upto[:, -1:]
    block = torch.searchsorted(upto, threshold, right=True).clamp_(max=sums.shape[1] - 1)
    before = upto.gather(1, (block - 1).clamp_(min=0)).masked_fill_(block == 0, 0.0)
    columns = block * BLOCK + torch.arange(BLOCK, device=sums.device)
    weights = weights_at(columns.clamp(max=size - 1)).masked_fill_(columns >= size, 0.0)
    return block.squeeze(1) * BLOCK + first_above(weights, threshold - before)


def first_above(weights: torch.Tensor, threshold: torch.Tensor) -> torch.Tensor:
    """[B, n], [B, 1] -> [B] the place where the running sum exceeds the threshold, which is kept below the last sum:
    rounding cannot leave the row or find a place without a weight."""
    upto = weights.double().cumsum(dim=-1)
    below = torch.nextafter(upto[:, -1:], torch.zeros_like(threshold))
    return torch.searchsorted(upto, torch.minimum(threshold, below), right=True).squeeze(1)
