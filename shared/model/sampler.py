"""Draw one token per row from softmax(logits), with log-prob and entropy of what was drawn.

    w_j = softmax(z)_j, rounded to fp32,   S = sum_j w_j, about 1,   log p_t = log(w_t / S)
    token = first j with  sum_{i <= j} w_i > u S,   u ~ U[0, 1) from the completion's own stream
    H = y_t - log p_t - sum_j w_j y_j / S,   y = z - max z

A row's draw depends on its own logits and its own u alone, never on the other rows (its entropy in the last bits).
Running sums are float64, or the tail of a large vocabulary would be lost to rounding. The search is in two levels: over
the sums of blocks of tokens, then inside one block, so the running sum of a whole vocabulary is never formed. A block
is summed in fp32, which changes its probability by a ten-millionth, as rounding its weights does; inside it, each
token has the share of its weight. A large vocabulary is gone through some rows at a time, which stay in the cache of
the processor; on a card, at once. Every token can be drawn: no top-k, no top-p.
shared/model/kernels/sampler.py does the same in two launches.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

BLOCK = 1024
"""Tokens in a block."""
AT_ONCE = 2**21
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
    at_once = max(1, AT_ONCE // logits.shape[1]) if logits.is_cpu else len(logits)
    parts = logits.split(at_once)
    of_parts = [None] * len(parts) if uniforms is None else uniforms.split(at_once)
    found = [draw_some(part, some) for part, some in zip(parts, of_parts, strict=True)]
    if len(found) == 1:
        return found[0]
    return DrawnTokens(
        ids=torch.cat([one.ids for one in found]),
        logprobs=torch.cat([one.logprobs for one in found]),
        entropies=torch.cat([one.entropies for one in found]),
    )


def draw_some(logits: torch.Tensor, uniforms: torch.Tensor | None) -> DrawnTokens:
    """For rows that stay in the cache together. `weights` are w_j, `total` is S."""
    # At a low temperature logits are in the thousands, and their rounding would be larger than an entropy.
    shifted = logits.sub_(logits.amax(dim=-1, keepdim=True))
    weights = torch.softmax(shifted, dim=-1)
    sums = block_sums(weights)
    total = sums.sum(dim=-1)
    if uniforms is None:
        ids = shifted.argmax(dim=-1)
    elif sums.shape[1] == 1:
        ids = first_above(weights, uniforms[:, None])
    else:
        ids = inverse_cdf(sums, uniforms, weights.shape[1], lambda columns: weights.gather(1, columns))
    logprobs = (weights.gather(1, ids[:, None]).squeeze(1) / total).log()
    log_sum = shifted.gather(1, ids[:, None]).squeeze(1) - logprobs
    mean = weights.mul_(shifted).sum(dim=-1) / total
    return DrawnTokens(ids=ids, logprobs=logprobs.float(), entropies=(log_sum - mean).float())


def block_sums(weights: torch.Tensor) -> torch.Tensor:
    """[B, V] -> [B, blocks] float64; the last block may be short."""
    whole = weights.shape[1] // BLOCK * BLOCK
    blocks = weights[:, :whole].unflatten(1, (-1, BLOCK)).sum(dim=-1) if whole else None
    if whole == weights.shape[1] and blocks is not None:
        return blocks.double()
    rest = weights[:, whole:].sum(dim=-1, keepdim=True)
    return (rest if blocks is None else torch.cat([blocks, rest], dim=1)).double()


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
    return block.squeeze(1) * BLOCK + first_above(weights, (threshold - before) / sums.gather(1, block))


def first_above(weights: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """[B, n], [B, 1] -> [B] the first place where the running sum exceeds this share of the whole. Rounding might put
    the share at the whole, where no place is found; it is kept below."""
    upto = weights.double().cumsum(dim=-1)
    below = torch.nextafter(upto[:, -1:], torch.zeros_like(share))
    return torch.searchsorted(upto, torch.minimum(share * upto[:, -1:], below), right=True).squeeze(1)
